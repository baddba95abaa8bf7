// What a test is told while it runs: what makes a thread wait, and what goes to another device.
//
// The listener is Python's and takes its lock, so nothing is told while the streams' lock is held:
// a thread that has Python's may be waiting for that one.
#pragma once

#include <atomic>
#include <string>

namespace simulated {

using Listener = void (*)(const char* kind, const char* what);

inline std::atomic<Listener> listener{nullptr};
inline std::atomic<int> own_device{-1};  // that a rank is to keep to; -1: any
inline thread_local bool is_telling = false;
inline thread_local int current_device = 0;  // threads begin on the first one

inline void tell(const char* kind, const std::string& what) {
    Listener told = listener;
    if (told && !is_telling) {
        is_telling = true;
        told(kind, what.c_str());
        is_telling = false;
    }
}

// An operation makes its thread wait for the device.
inline void tell_of_wait(const std::string& what) {
    tell("wait", what);
}

// A copy that was not to wait does, or is staged: its memory of the host is not page-locked.
inline void tell_of_pageable(const std::string& what) {
    tell("pageable", what);
}

// A call goes to `device`, where CUDA makes a context if the process has none there.
inline void tell_if_elsewhere(int device, const char* what) {
    int own = own_device;
    if (own >= 0 && device != own) {
        tell("elsewhere", std::string(what) + " on device " + std::to_string(device));
    }
}

}  // namespace simulated
