// Copies on the device, to it and from it, and which of them make a thread wait.
//
// As CUDA's: a copy that was not to wait does not where the host's memory is page-locked and no
// element is converted. What is not page-locked is read before the call returns, and a copy to it
// has ended by then.
#pragma once

#include "page_locked.h"
#include "tensors.h"

namespace simulated {

inline void copy_on_host(Tensor target, const Tensor& source) {
    c10::AutoGradMode gradients(false);
    at::AutoDispatchBelowADInplaceOrView below;
    target.copy_(source);
}

inline Mark submit_copy(int stream, Tensor target, Tensor source) {
    return submit(stream, {[target, source]() mutable { target.copy_(source); }});
}

// Whether the bytes go as they lie.
inline bool is_plain(const Tensor& target, const Tensor& source) {
    if (target.scalar_type() != source.scalar_type()) return false;
    if (target.is_contiguous() && source.is_contiguous()) return true;
    return target.strides() == source.strides() && target.is_non_overlapping_and_dense();
}

inline void tell_of_copy(bool is_to_host, bool non_blocking, int64_t numel) {
    std::string what = is_to_host ? "a copy to the host" : "a copy from the host";
    if (!non_blocking) tell_of_wait(what);
    else if (numel > 1) tell_of_pageable(what);
}

inline Tensor& copy(Tensor& target, const Tensor& given, bool non_blocking) {
    if (!target.numel()) return target;
    Tensor source = given.sizes() == target.sizes() ? given : given.expand(target.sizes());
    if (target.is_cuda() && source.is_cuda()) {
        submit_copy(current_stream(source.get_device()), reached(target), reached(source));
        return target;
    }
    bool is_to_host = source.is_cuda();
    const Tensor& host = is_to_host ? target : source;
    const Tensor& device = is_to_host ? source : target;
    TORCH_CHECK(host.is_cpu(), "no copy between ", host.device(), " and ", device.device());
    int stream = current_stream(device.get_device());
    if (non_blocking && is_plain(target, source) && is_page_locked(host.data_ptr())) {
        Tensor there = at::from_blob(
            host.data_ptr(), host.sizes(), host.strides(), host.options().pinned_memory(false));
        Mark mark = is_to_host ? submit_copy(stream, there, reached(source))
                               : submit_copy(stream, reached(target), there);
        note_use(host, mark);
        return target;
    }
    tell_of_copy(is_to_host, non_blocking, target.numel());
    if (is_to_host) {
        wait_for_stream(stream);
        copy_on_host(target, reached(source));
    } else {
        Tensor staged = source.to(target.scalar_type(), false, true).contiguous();
        submit_copy(stream, reached(target), staged);
        if (!non_blocking) wait_for_stream(stream);
    }
    return target;
}

inline at::Scalar item(const Tensor& tensor) {
    tell_of_wait("a number to the host");
    wait_for_stream(current_stream(tensor.get_device()));
    return reached(tensor).item();
}

}  // namespace simulated
