// What torch asks of CUDA as a whole: whether it is there, its memory, its generators.
#pragma once

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>

#include "memory.h"
#include "page_locked.h"

namespace simulated {

// Torch finds it by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
    explicit CUDAHooks(at::CUDAHooksArgs) {}
    void init() const override {}
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasCUDA() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return NUM_DEVICES; }
    int getNumGPUs() const override { return NUM_DEVICES; }
    c10::DeviceIndex current_device() const override { return current_device_index(); }
    c10::DeviceIndex getCurrentDevice() const override { return current_device_index(); }
    void setCurrentDevice(c10::DeviceIndex device) const override {
        simulated::current_device = device;
    }
    c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
        c10::DeviceIndex before = current_device_index();
        if (device >= 0) simulated::current_device = device;
        return before;
    }
    c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
        return exchangeDevice(device);
    }
    bool isPinnedPtr(const void* address) const override { return is_page_locked(address); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &host_memory; }
    c10::Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
    c10::Device getDeviceFromPtr(void*) const override {
        return c10::Device(c10::kCUDA, current_device_index());
    }
    void deviceSynchronize(c10::DeviceIndex) const override { wait_for_all(); }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
        static at::Generator one = at::make_generator<at::CPUGeneratorImpl>();
        return one;
    }
    at::Generator getNewGenerator(c10::DeviceIndex) const override {
        return at::make_generator<at::CPUGeneratorImpl>();
    }

private:
    static c10::DeviceIndex current_device_index() { return simulated::current_device; }
};

// The registry's macro writes these names without their namespace.
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)

struct Allocators {
    Allocators() {
        constexpr uint8_t ABOVE_ALL_OTHERS = 255;
        c10::SetAllocator(c10::kCUDA, &device_memory, ABOVE_ALL_OTHERS);
        at::setHostAllocator(c10::kCUDA, &host_memory, ABOVE_ALL_OTHERS);
    }
};

inline Allocators allocators;

}  // namespace simulated
