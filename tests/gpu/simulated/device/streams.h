// Streams: queues of operations that run as late as is legal, or in an order by chance.
//
// There are no threads of a device. An operation runs when somebody waits for it, or for one behind
// it, on the thread that waits, or when chance has it; so who does not wait for a stream reads
// what was there before.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <array>
#include <cstdio>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "notes.h"
#include "settings.h"

namespace simulated {

using Task = std::function<void()>;

struct Operation {
    Task run;               // none: it only waits
    int awaited = -1;       // a stream of which `until` operations must have run before
    uint64_t until = 0;
};

struct Stream {
    int device;
    std::deque<Operation> queue;
    uint64_t num_submitted = 0, num_done = 0;
};

// A place in a stream: so many of its operations.
struct Mark {
    int stream;
    uint64_t number;
};

// Lets an operation run as one of the host, without gradients.
class AsOnHost {
    c10::impl::ForceDispatchKeyGuard keys{
        c10::default_included_set,
        c10::autograd_dispatch_keyset | c10::default_excluded_set |
            c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView)};
    c10::AutoGradMode gradients{false};
};

struct Streams {
    std::recursive_mutex mutex;
    int depth = 0;                // how often the thread that has the mutex has it
    std::vector<Task> run_tasks;  // whose tensors are let go of without the mutex
    std::deque<Stream> all;       // first each device's default stream
    std::string error;            // of the first operation that failed
    std::mt19937 chance{SEED};

    Streams() {
        for (int device = 0; device < NUM_DEVICES; device++) all.push_back({device});
    }

    void run_first(int index) {
        Stream& stream = all[index];
        Operation operation = std::move(stream.queue.front());
        if (operation.awaited >= 0) run_until({operation.awaited, operation.until});
        if (operation.run) {
            AsOnHost guard;
            try {
                operation.run();
            } catch (c10::Error& failure) {
                fail(failure.what_without_backtrace());
            } catch (std::exception& failure) {
                fail(failure.what());
            }
            run_tasks.push_back(std::move(operation.run));
        }
        stream.queue.pop_front();
        stream.num_done++;
    }

    void run_until(Mark mark) {
        while (!has_run(mark)) run_first(mark.stream);
    }

    void run_all() {
        for (size_t index = 0; index < all.size(); index++) run_until(end_of(index));
    }

    void run_some_by_chance() {
        for (int left = chance() % 4; left > 0; left--) {
            int index = chance() % all.size();
            if (!all[index].queue.empty()) run_first(index);
        }
    }

    bool has_run(Mark mark) const { return all[mark.stream].num_done >= mark.number; }

    bool have_run(const std::vector<Mark>& marks) const {
        for (const Mark& mark : marks) {
            if (!has_run(mark)) return false;
        }
        return true;
    }

    Mark end_of(int index) const { return {index, all[index].num_submitted}; }

    void fail(const char* message) {
        std::fprintf(stderr, "an operation failed on the simulated device: %s\n", message);
        if (error.empty()) error = message;
    }
};

inline Streams& streams() {
    static Streams* one = new Streams;  // never deleted: threads may outlive static objects
    return *one;
}

// Holds the streams' mutex. What was run is let go of behind it: tensors of Python take its lock.
class Locked {
public:
    Streams& streams;
    Locked() : streams(simulated::streams()) {
        streams.mutex.lock();
        streams.depth++;
    }
    ~Locked() {
        std::vector<Task> let_go;
        if (streams.depth == 1) let_go.swap(streams.run_tasks);
        streams.depth--;
        streams.mutex.unlock();
    }
};

inline void raise_if_failed() {
    std::string error;
    {
        Locked locked;
        error = locked.streams.error;
    }
    TORCH_CHECK(error.empty(), "an operation failed on the simulated device before: ", error);
}

// The thread's stream on each device.
inline thread_local std::array<int, MOST_DEVICES> current_streams = [] {
    std::array<int, MOST_DEVICES> first;
    std::iota(first.begin(), first.end(), 0);
    return first;
}();

inline int device_or_current(int device) {
    return device < 0 ? current_device : device;
}

inline int current_stream(int device) {
    return current_streams[device_or_current(device)];
}

// A device's default stream has the id 0 for torch, another one its index.
inline int index_of(const c10::Stream& stream) {
    return stream.id() == 0 ? stream.device_index() : static_cast<int>(stream.id());
}

inline c10::Stream torch_stream(int index) {
    Locked locked;
    c10::DeviceIndex device = locked.streams.all[index].device;
    c10::StreamId id = index < NUM_DEVICES ? 0 : index;
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), id);
}

inline int new_stream(int device) {
    Locked locked;
    locked.streams.all.push_back({device_or_current(device)});
    return static_cast<int>(locked.streams.all.size()) - 1;
}

// Submits an operation without a word to the listener, for who holds the mutex.
inline Mark submit_quietly(int index, Operation operation) {
    Locked locked;
    Stream& stream = locked.streams.all[index];
    stream.queue.push_back(std::move(operation));
    stream.num_submitted++;
    Mark mark = locked.streams.end_of(index);
    if (BY_CHANCE) locked.streams.run_some_by_chance();
    if (stream.queue.size() > LONGEST_QUEUE) {
        locked.streams.run_until({index, stream.num_submitted - LONGEST_QUEUE / 2});
    }
    return mark;
}

inline Mark submit(int index, Operation operation) {
    int device;
    {
        Locked locked;
        device = locked.streams.all[index].device;
    }
    tell_if_elsewhere(device, "an operation");
    return submit_quietly(index, std::move(operation));
}

inline void wait_for(Mark mark) {
    {
        Locked locked;
        locked.streams.run_until(mark);
    }
    raise_if_failed();
}

inline void wait_for_stream(int index) {
    Mark end;
    {
        Locked locked;
        end = locked.streams.end_of(index);
    }
    wait_for(end);
}

inline void wait_for_all() {
    {
        Locked locked;
        locked.streams.run_all();
    }
    raise_if_failed();
}

// Lets a stream get on a little, as a device does while somebody asks again and again.
inline bool has_run_if_asked(Mark mark) {
    Locked locked;
    if (locked.streams.has_run(mark)) return true;
    for (int left = 8; left > 0 && !locked.streams.has_run(mark); left--) {
        locked.streams.run_first(mark.stream);
    }
    return false;
}

}  // namespace simulated
