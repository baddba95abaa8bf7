// Page-locked memory of the host: what torch gives out for pin_memory, and what was registered.
//
// As torch's own, a block is given out again once the copies that use it are done.
#pragma once

#include <ATen/core/CachingHostAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <unordered_map>

#include "streams.h"

namespace simulated {

inline constexpr size_t PAGE = 4096;

struct HostBlock {
    void* start;
    size_t size;
    std::vector<Mark> uses;
};

// Guarded by the streams' mutex.
struct PageLocked {
    std::map<const char*, size_t> ranges;
    std::unordered_map<void*, HostBlock> used;
    std::vector<HostBlock> freed;

    bool has(const void* address) const {
        auto above = ranges.upper_bound(static_cast<const char*>(address));
        if (above == ranges.begin()) return false;
        auto below = std::prev(above);
        return address < below->first + below->second;
    }

    void* take(size_t size, const Streams& streams) {
        for (size_t place = 0; place < freed.size(); place++) {
            if (freed[place].size == size && streams.have_run(freed[place].uses)) {
                void* start = freed[place].start;
                freed.erase(freed.begin() + place);
                return start;
            }
        }
        void* start = nullptr;
        TORCH_CHECK(!posix_memalign(&start, PAGE, size), "the host has no ", size, " bytes left");
        ranges[static_cast<char*>(start)] = size;
        return start;
    }
};

inline PageLocked& page_locked() {
    static PageLocked* one = new PageLocked;
    return *one;
}

inline bool is_page_locked(const void* address) {
    Locked locked;
    return page_locked().has(address);
}

inline void free_host_block(void* start) {
    Locked locked;
    auto found = page_locked().used.find(start);
    if (found == page_locked().used.end()) return;
    page_locked().freed.push_back(std::move(found->second));
    page_locked().used.erase(found);
}

// Notes that a copy which ends at `mark` uses the memory of `tensor`.
inline void note_use(const at::Tensor& tensor, Mark mark) {
    Locked locked;
    auto found = page_locked().used.find(tensor.storage().data_ptr().get_context());
    if (found != page_locked().used.end()) found->second.uses.push_back(mark);
}

struct HostMemory final : at::HostAllocator {
    c10::DataPtr allocate(size_t num_bytes) override {
        size_t size = PAGE;
        while (size < num_bytes) size *= 2;
        Locked locked;
        void* start = page_locked().take(size, locked.streams);
        page_locked().used[start] = {start, size, {}};
        std::memset(start, 0xff, size);
        return {start, start, &free_host_block, c10::Device(c10::kCPU)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_host_block; }
    void copy_data(void* target, const void* source, size_t num_bytes) const override {
        std::memcpy(target, source, num_bytes);
    }
    bool record_event(void* start, void*, c10::Stream stream) override {
        Locked locked;
        auto found = page_locked().used.find(start);
        if (found == page_locked().used.end()) return false;
        found->second.uses.push_back(locked.streams.end_of(index_of(stream)));
        return true;
    }
    void empty_cache() override {}
    at::HostStats get_stats() override {
        TORCH_CHECK(false, "the simulated device counts no memory of the host");
    }
    void reset_accumulated_stats() override {}
    void reset_peak_stats() override {}
};

inline HostMemory host_memory;

}  // namespace simulated
