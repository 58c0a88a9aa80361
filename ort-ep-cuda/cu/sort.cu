// TopK: the greatest or least elements of lines along an axis. Of short lines, each element counts those that come before it; longer ones
// are sorted in parts, each by a block, and the first of eight parts at a time are merged until one is left.
#include "keys.cuh"

// `kept` elements of each of `count` lines of `length`; `inner` lines lie side by side.
struct Lines {
    int count, length, inner, kept;
    int kind, bytes, largest;
};

// The elements that a block sorts, its threads, and the parts that are merged at once.
constexpr uint MOST_SORTED = 2048, THREADS = 256, WAYS = 8;

// A key and its place as they are ordered: in ascending order of keys elements come as they should, those of equal keys by place.
struct Wide {
    uint64 key;
    uint place;
};
__device__ inline bool before(uint64 a, uint64 b) { return a < b; }
__device__ inline bool before(const Wide& a, const Wide& b) { return a.key < b.key || (a.key == b.key && a.place < b.place); }
__device__ inline uint place_of(uint64 entry) { return uint(entry); }
__device__ inline uint place_of(const Wide& entry) { return entry.place; }

__device__ inline uint at_line(const Lines& p, uint line, uint place) {
    uint outer = line / p.inner;
    return (outer * p.length + place) * p.inner + (line - outer * p.inner);
}

// The entry of an element of a line.
template <typename E> __device__ inline E entry_of(const void* x, const Lines& p, uint line, uint place);
template <> __device__ inline uint64 entry_of<uint64>(const void* x, const Lines& p, uint line, uint place) {
    uint key = narrow_key(x, p.kind, at_line(p, line, place));
    return uint64(p.largest ? ~key : key) << 32 | place;
}
template <> __device__ inline Wide entry_of<Wide>(const void* x, const Lines& p, uint line, uint place) {
    uint64 key = wide_key(x, p.kind, at_line(p, line, place));
    return Wide{p.largest ? ~key : key, place};
}
// What comes behind every entry.
__device__ inline void set_last(uint64& entry) { entry = ~0ull; }
__device__ inline void set_last(Wide& entry) { entry = Wide{~0ull, 0xffffffffu}; }

// Writes the element of a rank to the results.
__device__ inline void keep(const void* x, void* values, int64* indices, const Lines& p, uint line, uint rank, uint place) {
    uint outer = line / p.inner, to = (outer * p.kept + rank) * p.inner + (line - outer * p.inner);
    if (indices) indices[to] = place;
    if (!values) return;
    uint from = at_line(p, line, place);
    switch (p.bytes) {
    case 1: static_cast<uint8*>(values)[to] = static_cast<const uint8*>(x)[from]; break;
    case 2: static_cast<uint16*>(values)[to] = static_cast<const uint16*>(x)[from]; break;
    case 4: static_cast<uint*>(values)[to] = static_cast<const uint*>(x)[from]; break;
    default: static_cast<uint64*>(values)[to] = static_cast<const uint64*>(x)[from];
    }
}

// The rank of each element of all lines.
template <typename E>
__device__ inline void count_ranks(const void* x, void* values, int64* indices, const Lines& p, uint count) {
    uint index = thread_index();
    if (index >= count) return;
    uint row = index / p.inner, outer = row / p.length, place = row - outer * p.length;
    uint line = outer * p.inner + (index - row * p.inner), rank = 0;
    E own = entry_of<E>(x, p, line, place);
    for (uint other = 0; other < p.length && rank < p.kept; other++) {
        rank += before(entry_of<E>(x, p, line, other), own);
    }
    if (rank < p.kept) keep(x, values, indices, p, line, rank, place);
}

// Sorts a part of a line of `size` elements, a power of two, in the block's memory (K. E. Batcher, "Sorting networks and their
// applications", 1968): the results, or the first `capacity` entries of each of the `parts` of a line.
template <typename E>
__device__ inline void sort_part(const void* x, void* values, int64* indices, E* entries, const Lines& p, uint parts,
                                 uint capacity, uint size) {
    __shared__ E own[MOST_SORTED];
    uint line = blockIdx.x / parts, first = (blockIdx.x - line * parts) * size;
    for (uint i = threadIdx.x; i < size; i += blockDim.x) {
        if (first + i < p.length) own[i] = entry_of<E>(x, p, line, first + i);
        else set_last(own[i]);
    }
    for (uint run = 2; run <= size; run *= 2) {
        for (uint reach = run / 2; reach > 0; reach /= 2) {
            __syncthreads();
            for (uint pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
                uint low = 2 * pair - (pair & (reach - 1)), high = low + reach;
                E a = own[low], b = own[high];
                if (before(b, a) == ((low & run) == 0)) {
                    own[low] = b;
                    own[high] = a;
                }
            }
        }
    }
    __syncthreads();
    uint end = min(capacity, p.length - first);
    for (uint rank = threadIdx.x; rank < end; rank += blockDim.x) {
        if (entries) entries[blockIdx.x * capacity + rank] = own[rank];
        else keep(x, values, indices, p, line, rank, place_of(own[rank]));
    }
}

// Sorted parts, as they lie in memory: `parts` of each line, of `size` elements each, the first `capacity` of which are there.
struct Parts {
    int parts, capacity, size;
};

// The rank of each entry among those of WAYS parts, the first of which are one part of `to`; the results where that is null.
template <typename E>
__device__ inline void merge_parts(const void* x, void* values, int64* indices, const E* entries, E* to, const Lines& p,
                                   const Parts& from, const Parts& merged, uint count) {
    uint index = thread_index();
    if (index >= count) return;
    uint row = index / from.capacity, line = row / from.parts, part = row - line * from.parts;
    uint rank = index - row * from.capacity;
    auto there = [&](uint part) { return min(uint(from.capacity), uint(p.length) - part * from.size); };
    if (rank >= there(part)) return;
    E own = entries[index];
    uint group = part / WAYS, end = min((group + 1) * WAYS, uint(from.parts));
    for (uint other = group * WAYS; other < end; other++) {
        if (other == part) continue;
        const E* base = entries + (line * from.parts + other) * from.capacity;
        uint low = 0, high = there(other);
        while (low < high) {
            uint middle = (low + high) / 2;
            if (before(base[middle], own)) low = middle + 1;
            else high = middle;
        }
        rank += low;
    }
    if (rank >= merged.capacity) return;
    if (to) to[(line * merged.parts + group) * merged.capacity + rank] = own;
    else keep(x, values, indices, p, line, rank, place_of(own));
}

#define ENTRIES(suffix, E)                                                                                          \
    extern "C" __global__ void count_ranks_##suffix(const void* x, void* values, int64* indices, Lines p, uint count) { \
        count_ranks<E>(x, values, indices, p, count);                                                               \
    }                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                           \
        sort_part_##suffix(const void* x, void* values, int64* indices, E* entries, Lines p, uint parts,            \
                           uint capacity, uint size) {                                                              \
        sort_part<E>(x, values, indices, entries, p, parts, capacity, size);                                        \
    }                                                                                                               \
    extern "C" __global__ void merge_parts_##suffix(const void* x, void* values, int64* indices, const E* entries,  \
                                                    E* to, Lines p, Parts from, Parts merged, uint count) {         \
        merge_parts<E>(x, values, indices, entries, to, p, from, merged, count);                                    \
    }

ENTRIES(narrow, uint64)
ENTRIES(wide, Wide)
