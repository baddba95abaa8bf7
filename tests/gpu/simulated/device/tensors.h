// Tensors of the device: how they are made, resized and given another storage, and how operations
// reach them.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>

#include "memory.h"

namespace simulated {

using at::IntArrayRef;
using at::Tensor;

// The tensor as one of the host, where operations of a stream may touch it. It owns no memory.
inline Tensor reached(const Tensor& tensor) {
    void* data = tensor.numel() ? tensor.data_ptr() : nullptr;
    TORCH_CHECK(!data || memory().has(data), "a tensor of the device is outside of its memory");
    auto options = at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU);
    return at::from_blob(memory().reach(data), tensor.sizes(), tensor.strides(), options);
}

// Lets the thread be on a device, and go back without a word.
class OnDevice {
    int before = current_device;

public:
    explicit OnDevice(int device) { current_device = device_or_current(device); }
    ~OnDevice() { current_device = before; }
};

inline const c10::DispatchKeySet KEYS(c10::DispatchKey::CUDA);

inline Tensor new_tensor(
    IntArrayRef sizes, at::ScalarType dtype, int device,
    std::optional<at::MemoryFormat> format = std::nullopt) {
    OnDevice there(device);
    return at::detail::empty_generic(sizes, &device_memory, KEYS, dtype, format);
}

inline Tensor new_strided_tensor(
    IntArrayRef sizes, IntArrayRef strides, at::ScalarType dtype, int device) {
    OnDevice there(device);
    return at::detail::empty_strided_generic(sizes, strides, &device_memory, KEYS, dtype);
}

inline at::ScalarType dtype_given(std::optional<at::ScalarType> dtype) {
    return dtype ? *dtype : at::typeMetaToScalarType(at::get_default_dtype());
}

inline void refuse_page_locked(std::optional<bool> pin_memory) {
    TORCH_CHECK(!pin_memory.value_or(false), "memory of a device cannot be page-locked");
}

inline Tensor empty(
    IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
    refuse_page_locked(pin_memory);
    return new_tensor(sizes, dtype_given(dtype), device ? device->index() : -1, format);
}

inline Tensor empty_strided(
    IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool> pin_memory) {
    refuse_page_locked(pin_memory);
    return new_strided_tensor(
        sizes, strides, dtype_given(dtype), device ? device->index() : -1);
}

inline const Tensor& resize_tensor(
    const Tensor& tensor, IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
    if (tensor.sizes() == sizes && !format) return tensor;
    at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    impl->set_sizes_contiguous(sizes);
    if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
    size_t needed = at::detail::computeStorageNbytes(
        tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
    c10::Storage storage = tensor.storage();  // another handle of the same
    if (tensor.numel() && storage.nbytes() < needed) {
        OnDevice there(tensor.get_device());
        c10::DataPtr larger = device_memory.allocate(needed);
        if (storage.nbytes()) {
            device_memory.copy_data(larger.get(), storage.data_ptr().get(), storage.nbytes());
        }
        storage.set_data_ptr_noswap(std::move(larger));
        storage.set_nbytes(needed);
    }
    return tensor;
}

inline Tensor& set_storage_part(
    Tensor& tensor, c10::Storage storage, int64_t offset, IntArrayRef sizes, IntArrayRef strides) {
    at::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(std::move(storage));
    impl->set_storage_offset(offset);
    if (strides.size() == sizes.size() && strides.data()) {
        impl->set_sizes_and_strides(sizes, strides);
    } else {
        impl->set_sizes_contiguous(sizes);
    }
    return tensor;
}

inline Tensor& set_storage(Tensor& tensor, c10::Storage storage) {
    int64_t numel = storage.nbytes() / tensor.itemsize();
    return set_storage_part(tensor, std::move(storage), 0, {numel}, {});
}

inline Tensor& set_tensor(Tensor& tensor, const Tensor& other) {
    return set_storage_part(
        tensor, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}

inline Tensor& set_nothing(Tensor& tensor) {
    return set_tensor(tensor, new_tensor({0}, tensor.scalar_type(), tensor.get_device()));
}

inline void record_stream(Tensor& tensor, c10::Stream stream) {
    device_memory.recordStream(tensor.storage().data_ptr(), stream);
}

}  // namespace simulated
