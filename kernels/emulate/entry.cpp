/* Linked into every emulated kernel library: where its __shared__ variables live.
 * The compiler asks __tls_get_addr for the address of a thread-local variable by its offset in this library's
 * thread-local segment. Ours adds that offset to the running block's shared memory. dynamic.s puts the
 * dynamic arrays at the segment's end. */
#include "fibers.h"

struct TlsIndex {
    unsigned long module, offset;
};

extern "C" __attribute__((visibility("hidden"))) void* __tls_get_addr(TlsIndex* index) {
    return emulate_self->shared + index->offset;
}

extern thread_local char emulate_static_end[], emulate_dynamic_begin[];

/* Bytes of static shared memory, and where the dynamic part begins. */
extern "C" __attribute__((visibility("default"))) void emulate_shared_layout(unsigned long* end,
                                                                             unsigned long* begin) {
    emulate::Thread nobody{};
    emulate_self = &nobody;
    asm volatile("" ::: "memory");  // the compiler does not know that a thread-local address reads memory
    char* base = nullptr;
    *end = emulate_static_end - base;
    *begin = emulate_dynamic_begin - base;
    emulate_self = nullptr;
}
