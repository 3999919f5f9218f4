// A function that runs on a stack of its own, on one thread of the CPU, until it lets the scheduler go on.
//
// Only the first switch uses setcontext. Later ones use _setjmp and _longjmp, which, unlike swapcontext, make no system
// call.
#pragma once
#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>
#include <memory>

static jmp_buf scheduler;

class Coroutine {
    std::unique_ptr<char[]> stack;
    ucontext_t first;
    jmp_buf place;
    bool begun;

  public:
    // Makes the next `resume` begin `run`, which must not return.
    void start(size_t stack_bytes, void (*run)()) {
        if (!stack) stack.reset(new char[stack_bytes]);
        begun = false;
        getcontext(&first);
        first.uc_stack.ss_sp = stack.get();
        first.uc_stack.ss_size = stack_bytes;
        makecontext(&first, run, 0);
    }

    // Runs it until it pauses.
    void resume() {
        if (_setjmp(scheduler)) return;
        if (begun) _longjmp(place, 1);
        begun = true;
        setcontext(&first);
    }

    // Goes on after the `resume` that runs it.
    void pause() {
        if (!_setjmp(place)) _longjmp(scheduler, 1);
    }
};
