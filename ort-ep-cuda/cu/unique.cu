// Unique: `order` has the items, which are elements or slices of a tensor, in the order of their keys, equal ones by their places. Where a group of
// equal items begins, `heads` is 1.
#include "keys.cuh"

// Slices of `outer` times `run` elements, `size` of them along an axis. Those of an empty tensor have no elements.
struct Slices {
    int outer, size, run, kind;
};

template <bool WIDE> struct Keys;
template <> struct Keys<false> {
    typedef uint Key;
    __device__ static uint of(const void* x, int kind, uint at) { return narrow_key(x, kind, at); }
};
template <> struct Keys<true> {
    typedef uint64 Key;
    __device__ static uint64 of(const void* x, int kind, uint at) { return wide_key(x, kind, at); }
};

// Below zero, zero or above, as slice a comes before slice b, is equal, or comes behind.
template <bool WIDE> __device__ inline int compare(const void* x, const Slices& p, uint a, uint b) {
    for (uint outer = 0; outer < p.outer; outer++) {
        uint from = (outer * p.size + a) * p.run, other = (outer * p.size + b) * p.run;
        for (uint i = 0; i < p.run; i++) {
            typename Keys<WIDE>::Key own = Keys<WIDE>::of(x, p.kind, from + i), with = Keys<WIDE>::of(x, p.kind, other + i);
            if (own != with) return own < with ? -1 : 1;
        }
    }
    return 0;
}

// Merges pairs of sorted runs of `length` slices: each slice goes behind those of its own run before it, and behind those of the other that come
// before it. Without `from` the slices are in the order of their places.
template <bool WIDE>
__device__ inline void merge_slices(const void* x, const int64* from, int64* to, const Slices& p, uint length) {
    uint index = thread_index();
    if (index >= p.size) return;
    auto item = [=](uint at) { return from ? static_cast<uint>(from[at]) : at; };
    uint part = index / length, first = part * length, own = item(index);
    uint begin = min((part ^ 1) * length, static_cast<uint>(p.size)), low = begin;
    uint high = min(begin + length, static_cast<uint>(p.size));
    while (low < high) {
        uint middle = low + (high - low) / 2, other = item(middle);
        int order = compare<WIDE>(x, p, other, own);
        if (order < 0 || (order == 0 && other < own)) low = middle + 1;
        else high = middle;
    }
    to[min(first, begin) + (index - first) + (low - begin)] = own;
}

// Where groups begin: in the order of the keys, and where it is asked for in that of the places.
template <bool WIDE>
__device__ inline void mark_heads(const void* x, const int64* order, uint8* heads, uint8* firsts, const Slices& p) {
    uint index = thread_index();
    if (index >= p.size) return;
    uint item = order[index];
    uint8 is_head = index == 0 || compare<WIDE>(x, p, static_cast<uint>(order[index - 1]), item) != 0;
    heads[index] = is_head;
    if (firsts) firsts[item] = is_head;
}

#define ENTRIES(suffix, WIDE)                                                                                       \
    extern "C" __global__ void merge_slices_##suffix(const void* x, const int64* from, int64* to, Slices p,         \
                                                     uint length) {                                                 \
        merge_slices<WIDE>(x, from, to, p, length);                                                                 \
    }                                                                                                               \
    extern "C" __global__ void mark_heads_##suffix(const void* x, const int64* order, uint8* heads, uint8* firsts,  \
                                                   Slices p) {                                                      \
        mark_heads<WIDE>(x, order, heads, firsts, p);                                                               \
    }

ENTRIES(narrow, false)
ENTRIES(wide, true)

// How many of `count` ascending numbers are below `number`.
__device__ inline uint below(const int64* numbers, uint count, int64 number) {
    uint low = 0, high = count;
    while (low < high) {
        uint middle = low + (high - low) / 2;
        if (numbers[middle] < number) low = middle + 1;
        else high = middle;
    }
    return low;
}

// The number of a group in the result: that of its key, or where the places of all first items are given, that of its own among them.
__device__ inline uint number_of(uint group, const int64* order, const int64* starts, const int64* firsts, uint count) {
    return firsts ? below(firsts, count, order[starts[group]]) : group;
}

// The first item of each group, and how many items it has.
extern "C" __global__ void groups(const int64* order, const int64* starts, const int64* firsts, int64* first_items, int64* counts,
                                  uint count, uint size) {
    uint group = thread_index();
    if (group >= count) return;
    uint number = number_of(group, order, starts, firsts, count);
    int64 start = starts[group], end = group + 1 < count ? starts[group + 1] : size;
    if (first_items) first_items[number] = order[start];
    if (counts) counts[number] = end - start;
}

// The group of each item.
extern "C" __global__ void inverse(const int64* order, const int64* starts, const int64* firsts, int64* y, uint count, uint size) {
    uint index = thread_index();
    if (index >= size) return;
    uint group = below(starts, count, static_cast<int64>(index) + 1) - 1;
    y[order[index]] = number_of(group, order, starts, firsts, count);
}
