/* Fibers' stacks and the switch between them and the scheduler; faults inside a kernel become errors. */
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "scheduler.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#ifndef __x86_64__
#error "the emulator's fiber switch is written for x86-64"
#endif

extern "C" {
emulate::Thread* emulate_self;
emulate::Grid emulate_grid;

/* Saves the registers a call must keep, trades stacks, restores the other side's. */
void emulate_switch(void** save, void* load);
asm(R"(
.text
.globl emulate_switch
.hidden emulate_switch
.type emulate_switch, @function
emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulate_switch, .-emulate_switch
)");
}

namespace emulate {

static void* scheduler_stack_pointer;
static std::vector<char*> free_stacks;
static unsigned stacks_made;

#ifdef __SANITIZE_ADDRESS__
static const void* scheduler_bottom;
static size_t scheduler_bytes;
static void leave_for(const void* bottom, size_t bytes, void** fake) {
    __sanitizer_start_switch_fiber(fake, bottom, bytes);
}
static void enter(void* fake, const void** bottom, size_t* bytes) {
    __sanitizer_finish_switch_fiber(fake, bottom, bytes);
}
#endif

static void to_scheduler() {
#ifdef __SANITIZE_ADDRESS__
    void* fake;
    leave_for(scheduler_bottom, scheduler_bytes, &fake);
#endif
    emulate_switch(&self()->stack_pointer, scheduler_stack_pointer);
#ifdef __SANITIZE_ADDRESS__
    enter(fake, nullptr, nullptr);
#endif
}

static void fiber_main() {
#ifdef __SANITIZE_ADDRESS__
    enter(nullptr, &scheduler_bottom, &scheduler_bytes);
#endif
    launch.request->entry(launch.request->arguments);
    fiber_ends(self());
    to_scheduler();
    __builtin_unreachable();
}

static char* new_stack() {
    if (!free_stacks.empty()) {
        char* stack = free_stacks.back();
        free_stacks.pop_back();
        return stack;
    }
    void* memory = mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
    if (memory == MAP_FAILED) return nullptr;
    // Each guard page costs two of the kernel's 65530 mappings, so only the first stacks have one.
    if (stacks_made++ < 16000) mprotect(memory, 4096, PROT_NONE);
    return (char*)memory;
}

void release_stack(char* stack) { free_stacks.push_back(stack); }

void start_fiber(Fiber* fiber) {
    fiber->stack = new_stack();
    if (!fiber->stack) return;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(fiber->stack + 4096, STACK_BYTES - 4096);
#endif
    // Stacks begin at different lines of a page: all at the same one would share few lines of the caches.
    unsigned turn = (uintptr_t)fiber->stack / STACK_BYTES % 64;
    void** top = (void**)(fiber->stack + STACK_BYTES - turn * 64);
    *--top =
        nullptr;  // fiber_main has no caller; entered by a return, its stack is 8 modulo 16 as after a call
    *--top = (void*)fiber_main;
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    fiber->stack_pointer = top;
}

void run_fiber(Fiber* fiber) {
    emulate_self = fiber;
    fiber->waits_for = nullptr;
    ++launch.runs;
#ifdef __SANITIZE_ADDRESS__
    void* fake;
    leave_for(fiber->stack, STACK_BYTES, &fake);
#endif
    emulate_switch(&scheduler_stack_pointer, fiber->stack_pointer);
#ifdef __SANITIZE_ADDRESS__
    enter(fake, nullptr, nullptr);
#endif
    emulate_self = nullptr;
}

void wait_for(const char* what, Site site) {
    Fiber* fiber = self();
    fiber->waits_for = what;
    fiber->site = site;
    to_scheduler();
}

void fail(const char* format, ...) {
    Request* request = launch.request;
    Fiber* fiber = self();
    int at = snprintf(request->error, sizeof request->error,
                      "kernel %s, block (%u, %u, %u), thread (%u, %u, %u): ", request->name,
                      fiber->block_index.x, fiber->block_index.y, fiber->block_index.z, fiber->thread.x,
                      fiber->thread.y, fiber->thread.z);
    va_list rest;
    va_start(rest, format);
    vsnprintf(request->error + at, sizeof request->error - at, format, rest);
    va_end(rest);
    launch.has_failed = true;
    to_scheduler();
    __builtin_unreachable();
}

// ---- faults ----

static const int signals[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};
static struct sigaction before[4];
static stack_t stack_before;
static char signal_stack[64 << 10];

static void on_fault(int number, siginfo_t* info, void* context) {
    if (!emulate_self) {  // not ours: let the earlier handler have it when the instruction runs again
        release_faults();
        return;
    }
    void* code = (void*)((ucontext_t*)context)->uc_mcontext.gregs[REG_RIP];
    char* address = (char*)info->si_addr;
    Fiber* fiber = self();
    if (number == SIGILL)
        fail("undefined behaviour (overflow, shift, misaligned or out-of-bounds access), code [%p]", code);
    if (number == SIGFPE) fail("integer division by zero or overflow, code [%p]", code);
    if (address >= fiber->stack && address < fiber->stack + 4096) fail("stack overflow, code [%p]", code);
    fail("invalid memory access at %p, code [%p]%s", (void*)address, code,
         launch.saved.empty() ? "" : " (before griddep_wait, where the predecessor's outputs hold NaN bits)");
}

void catch_faults() {
#ifndef __SANITIZE_ADDRESS__
    stack_t stack{};
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &stack_before);
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // we never return from it, so it must not mask
    for (int i = 0; i < 4; ++i) sigaction(signals[i], &action, &before[i]);
#endif
}

void release_faults() {
#ifndef __SANITIZE_ADDRESS__
    for (int i = 0; i < 4; ++i) sigaction(signals[i], &before[i], nullptr);
    sigaltstack(&stack_before, nullptr);
#endif
}

// ---- watchdog: a thread that never waits, say because it polls plain memory, would hang the process ----

constexpr int WATCHDOG_SIGNAL_OFFSET = 7;
static timer_t watchdog;
static bool has_watchdog;
static uint64_t runs_at_tick;
static struct sigaction watchdog_before;

static void on_tick(int, siginfo_t*, void*) {
    bool is_stuck = emulate_self && runs_at_tick == launch.runs;
    runs_at_tick = launch.runs;
    if (is_stuck)
        fail(
            "has run for over %g s of processor time without waiting for anyone; a loop that polls memory "
            "must use load_acquire",
            launch.request->patience);
}

void start_watchdog() {
    struct sigaction action{};
    action.sa_sigaction = on_tick;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
    int number = SIGRTMIN + WATCHDOG_SIGNAL_OFFSET;
    sigaction(number, &action, &watchdog_before);
    sigevent event{};
    event.sigev_notify = SIGEV_THREAD_ID;
    event.sigev_signo = number;
    event._sigev_un._tid = (int)syscall(SYS_gettid);
    runs_at_tick = 0;
    has_watchdog = !timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &watchdog);
    double patience = launch.request->patience;
    timespec tick{(time_t)patience, (long)((patience - (time_t)patience) * 1e9)};
    itimerspec period{tick, tick};
    if (has_watchdog) timer_settime(watchdog, 0, &period, nullptr);
}

void stop_watchdog() {
    if (has_watchdog) timer_delete(watchdog);
    sigaction(SIGRTMIN + WATCHDOG_SIGNAL_OFFSET, &watchdog_before, nullptr);
}

}  // namespace emulate
