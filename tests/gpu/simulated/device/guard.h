// Devices, streams and events, as torch asks for them.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <chrono>
#include <memory>

#include "memory.h"

namespace simulated {

struct Event {
    Mark mark{-1, 0};
    std::shared_ptr<double> milliseconds;  // on the host's clock, when it has run
};

inline double now() {
    using Milliseconds = std::chrono::duration<double, std::milli>;
    return Milliseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline void wait_and_tell(Mark mark, const char* what) {
    bool has_run;
    {
        Locked locked;
        has_run = locked.streams.has_run(mark);
    }
    if (!has_run) tell_of_wait(what);
    wait_for(mark);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
    static c10::Device device_of(int index) {
        return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
    }
    static Event* recorded(void* event) {
        Event* one = static_cast<Event*>(event);
        return one && one->mark.stream >= 0 ? one : nullptr;
    }

public:
    c10::DeviceType type() const override { return c10::kCUDA; }
    c10::DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
    c10::Device getDevice() const override { return device_of(current_device); }
    c10::Device exchangeDevice(c10::Device device) const override {
        c10::Device before = getDevice();
        check(device);
        uncheckedSetDevice(device);
        return before;
    }
    void setDevice(c10::Device device) const override {
        check(device);
        tell_if_elsewhere(device_or_current(device.index()), "a thread's device");
        uncheckedSetDevice(device);
    }
    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.index() >= 0) current_device = device.index();
    }
    static void check(c10::Device device) {
        TORCH_CHECK(
            device.index() < NUM_DEVICES, "there is no simulated device ", int(device.index()),
            ", there are ", NUM_DEVICES);
    }

    c10::Stream getStream(c10::Device device) const override {
        return torch_stream(current_stream(device.index()));
    }
    c10::Stream getDefaultStream(c10::Device device) const override {
        return torch_stream(device_or_current(device.index()));
    }
    c10::Stream getNewStream(c10::Device device, int) const override {
        return torch_stream(new_stream(device.index()));
    }
    c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return torch_stream(new_stream(device.index()));
    }
    c10::Stream exchangeStream(c10::Stream stream) const override {
        int& current = current_streams[stream.device_index()];
        c10::Stream before = torch_stream(current);
        current = index_of(stream);
        return before;
    }
    void* getStreamNativeHandle(const c10::Stream stream) const override {
        return reinterpret_cast<void*>(static_cast<intptr_t>(index_of(stream)));
    }
    bool queryStream(const c10::Stream& stream) const override {
        tell_if_elsewhere(current_device, "a query of a stream");
        Mark end;
        {
            Locked locked;
            end = locked.streams.end_of(index_of(stream));
        }
        return has_run_if_asked(end);
    }
    void synchronizeStream(const c10::Stream& stream) const override {
        tell_if_elsewhere(current_device, "a wait for a stream");
        Mark end;
        {
            Locked locked;
            end = locked.streams.end_of(index_of(stream));
        }
        wait_and_tell(end, "a stream");
    }
    void synchronizeDevice(c10::DeviceIndex) const override {
        tell_of_wait("all streams");
        wait_for_all();
    }

    void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
        delete static_cast<Event*>(event);
    }
    void record(
        void** event, const c10::Stream& stream, c10::DeviceIndex,
        const c10::EventFlag) const override {
        if (!*event) *event = new Event;
        Event* one = static_cast<Event*>(*event);
        auto milliseconds = std::make_shared<double>(0.0);
        one->milliseconds = milliseconds;
        one->mark = submit(index_of(stream), {[milliseconds] { *milliseconds = now(); }});
    }
    void block(void* event, const c10::Stream& stream) const override {
        Event* one = recorded(event);
        if (one) submit(index_of(stream), {nullptr, one->mark.stream, one->mark.number});
    }
    bool queryEvent(void* event) const override {
        Event* one = recorded(event);
        if (!one) return true;
        tell_if_elsewhere(current_device, "a query of an event");
        return has_run_if_asked(one->mark);
    }
    void synchronizeEvent(void* event) const override {
        Event* one = recorded(event);
        if (!one) return;
        tell_if_elsewhere(current_device, "a wait for an event");
        wait_and_tell(one->mark, "an event");
    }
    double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
        Event *from = recorded(first), *to = recorded(second);
        TORCH_CHECK(from && to, "an event of the two was never recorded");
        Locked locked;
        TORCH_CHECK(
            locked.streams.have_run({from->mark, to->mark}), "an event of the two has not run yet");
        return *to->milliseconds - *from->milliseconds;
    }
    void recordDataPtrOnStream(
        const c10::DataPtr& data, const c10::Stream& stream) const override {
        device_memory.recordStream(data, stream);
    }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace simulated
