// What the environment says of the simulated accelerator, read once when the library is loaded.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>

namespace simulated {

inline std::string text_of(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return value ? value : otherwise;
}

inline int number_of(const char* name, const char* otherwise, int least, int most) {
    std::string text = text_of(name, otherwise);
    char* end = nullptr;
    long value = std::strtol(text.c_str(), &end, 10);
    if (text.empty() || *end || value < least || value > most) {
        std::fprintf(
            stderr, "%s is \"%s\"; give a number from %d to %d\n", name, text.c_str(), least, most);
        std::abort();
    }
    return static_cast<int>(value);
}

// Whether operations of streams run as late as is legal, or in an order by chance.
inline bool is_order_by_chance() {
    std::string order = text_of("SIMULATED_ORDER", "late");
    if (order != "late" && order != "chance") {
        std::fprintf(
            stderr, "SIMULATED_ORDER is \"%s\"; give \"late\" or \"chance\"\n", order.c_str());
        std::abort();
    }
    return order == "chance";
}

inline constexpr int MOST_DEVICES = 8;
inline constexpr size_t NUM_BYTES = size_t{4} << 30;  // of memory, all devices together
inline constexpr size_t LONGEST_QUEUE = 20000;  // of a stream: more, and its oldest half runs

inline const int NUM_DEVICES = number_of("SIMULATED_DEVICES", "1", 1, MOST_DEVICES);
inline const bool BY_CHANCE = is_order_by_chance();
inline const unsigned SEED = number_of("SIMULATED_SEED", "0", 0, 1 << 30);

}  // namespace simulated
