// A simulated accelerator in CUDA's place, for a torch that was built without CUDA.
//
// It registers under torch's own names for CUDA before torch asks for them, so the library is to be
// loaded before torch's Python is imported. Results are those of the host; what is like a GPU is
// what a program sees of memory, streams and waits: see memory.h, streams.h, copies.h.
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>

#include "guard.h"
#include "hooks.h"
#include "operations.h"

namespace simulated {

TORCH_LIBRARY_IMPL(_, CUDA, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_operation>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
    library.impl("empty.memory_format", empty);
    library.impl("empty_strided", empty_strided);
    library.impl("resize_", resize_tensor);
    library.impl("set_", set_nothing);
    library.impl("set_.source_Storage", set_storage);
    library.impl("set_.source_Storage_storage_offset", set_storage_part);
    library.impl("set_.source_Tensor", set_tensor);
    library.impl("copy_", copy);
    library.impl("_local_scalar_dense", item);
    library.impl("record_stream", record_stream);
    // views, which look at no data: the host's serve
    library.impl("_reshape_alias", at::native::_reshape_alias);
    library.impl("as_strided", at::native::as_strided_tensorimpl);
    library.impl("is_set_to", at::native::is_set_to);
    library.impl("unfold", at::native::unfold);
    library.impl("view", at::native::view);
}

}  // namespace simulated

// For ctypes.
extern "C" {

void simulated_listen(simulated::Listener told) {
    simulated::listener = told;
}

// Lets a rank be told of each call to another device than its own; -1: of none.
void simulated_keep_to(int device) {
    simulated::own_device = device;
}

int simulated_num_devices() {
    return simulated::NUM_DEVICES;
}

int simulated_device() {
    return simulated::current_device;
}

void simulated_set_device(int device) {
    simulated::current_device = device;
}

void simulated_register(const char* start, size_t num_bytes) {
    simulated::Locked locked;
    simulated::page_locked().ranges[start] = num_bytes;
}

// Waits, as CUDA does: copies may still use the memory.
void simulated_unregister(const char* start) {
    simulated::Locked locked;
    locked.streams.run_all();
    simulated::page_locked().ranges.erase(start);
}

}
