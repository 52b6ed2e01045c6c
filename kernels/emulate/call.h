/* Calls a kernel with its arguments from an array of pointers to them, as the driver's launch does. */
#pragma once
#include <utility>

namespace emulate {
template <class... A, size_t... I>
void call_each(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_const_t<A>*>(arguments[I])...);
}
template <class... A>
void call(void (*kernel)(A...), void** arguments) {
    call_each(kernel, arguments, std::index_sequence_for<A...>{});
}
}  // namespace emulate
