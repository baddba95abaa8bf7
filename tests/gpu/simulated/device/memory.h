// The devices' memory: mapped twice, once where tensors point and no read or write is allowed, and
// once where operations of a stream work.
//
// Blocks are given out as CUDA's caching allocator does it: what was freed goes at once to the next
// that asks on the same stream, behind what that stream has been given, and not before the streams
// that were noted for it have come so far. A new block is filled with NaN, in its stream's order.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <set>
#include <unordered_map>

#include "streams.h"

namespace simulated {

inline constexpr size_t GRAIN = 512;  // bytes that blocks are multiples of

struct Block {
    void* start;
    size_t size;
    int stream;                  // whose it is
    std::set<int> other_streams;  // noted by record_stream
};

struct HeldBlock {
    Block block;
    std::vector<Mark> uses;  // it is free when these have run
};

struct Memory {
    char *guarded, *reachable;
    size_t num_given = GRAIN;  // bytes from the start; no block is at the start itself
    std::unordered_map<void*, Block> used;
    std::map<std::pair<int, size_t>, std::vector<void*>> free;  // by stream and size
    std::vector<HeldBlock> held;

    Memory() {
        int file = memfd_create("simulated_accelerator", 0);
        if (file < 0 || ftruncate(file, NUM_BYTES)) fail("a file in memory");
        guarded = map(file, PROT_NONE);
        reachable = map(file, PROT_READ | PROT_WRITE);
        close(file);
    }

    static char* map(int file, int protection) {
        int flags = MAP_SHARED | MAP_NORESERVE;
        void* start = mmap(nullptr, NUM_BYTES, protection, flags, file, 0);
        if (start == MAP_FAILED) fail("a mapping");
        return static_cast<char*>(start);
    }

    [[noreturn]] static void fail(const char* what) {
        std::perror(what);
        std::abort();
    }

    bool has(const void* address) const {
        return address >= guarded && address < guarded + NUM_BYTES;
    }

    // Where operations reach what a tensor points to.
    void* reach(const void* address) const {
        if (!address) return nullptr;
        return reachable + (static_cast<const char*>(address) - guarded);
    }

    void put_back(const Block& block) { free[{block.stream, block.size}].push_back(block.start); }

    void put_back_what_is_done(const Streams& streams) {
        std::vector<HeldBlock> still;
        for (HeldBlock& each : held) {
            if (streams.have_run(each.uses)) put_back(each.block);
            else still.push_back(std::move(each));
        }
        held.swap(still);
    }

    void* take(int stream, size_t size) {
        std::vector<void*>& starts = free[{stream, size}];
        if (!starts.empty()) {
            void* start = starts.back();
            starts.pop_back();
            return start;
        }
        TORCH_CHECK(
            num_given + size <= NUM_BYTES, "the simulated device has no ", size, " bytes left of ",
            NUM_BYTES);
        void* start = guarded + num_given;
        num_given += size;
        return start;
    }
};

inline Memory& memory() {
    static Memory* one = new Memory;
    return *one;
}

inline void free_block(void* start) {
    Locked locked;
    Memory& all = memory();
    auto found = all.used.find(start);
    if (found == all.used.end()) return;  // of no bytes
    Block block = std::move(found->second);
    all.used.erase(found);
    std::vector<Mark> uses;
    for (int stream : block.other_streams) {
        if (stream != block.stream) uses.push_back(locked.streams.end_of(stream));
    }
    if (uses.empty()) all.put_back(block);
    else all.held.push_back({std::move(block), std::move(uses)});
}

inline void* new_block(size_t num_bytes, int device) {
    if (!num_bytes) return nullptr;
    tell_if_elsewhere(device, "memory");
    Locked locked;
    Memory& all = memory();
    int stream = current_stream(device);
    size_t size = (num_bytes + GRAIN - 1) / GRAIN * GRAIN;
    all.put_back_what_is_done(locked.streams);
    void* start = all.take(stream, size);
    all.used[start] = {start, size, stream, {}};
    void* reached = all.reach(start);
    submit_quietly(stream, {[reached, size] { std::memset(reached, 0xff, size); }});
    return start;
}

struct DeviceMemory final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t num_bytes) override {
        void* start = new_block(num_bytes, current_device);
        c10::DeviceIndex device = current_device;
        return {start, start, &free_block, c10::Device(c10::kCUDA, device)};
    }
    c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
    void copy_data(void* target, const void* source, size_t num_bytes) const override {
        void *to = memory().reach(target), *from = memory().reach(source);
        submit(current_stream(-1), {[to, from, num_bytes] { std::memcpy(to, from, num_bytes); }});
    }
    void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
        Locked locked;
        auto found = memory().used.find(data.get_context());
        if (found != memory().used.end()) found->second.other_streams.insert(index_of(stream));
    }
    bool initialized() override { return true; }
    void emptyCache(c10::MempoolId_t) override {}
    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
        TORCH_CHECK(false, "the simulated device counts no memory");
    }
    void resetAccumulatedStats(c10::DeviceIndex) override {}
    void resetPeakStats(c10::DeviceIndex) override {}
};

inline DeviceMemory device_memory;

}  // namespace simulated
