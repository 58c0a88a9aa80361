// Updates that are combined with what is there, and with each other, in the order in which they are given: they are sorted by the elements that
// they go to, so that each element has its updates in a row, and no run has other bits than the one before.
#include "indices.cuh"

// A key is the slot of an update, then its number: no two are alike. A block sorts as many as it has room for, a power of two.
constexpr int MOST_KEYS = 2048;

__device__ inline uint64 key_of(uint slot, uint update) { return (uint64)slot << 32 | update; }

extern "C" __global__ void __launch_bounds__(256)
    scatter_sort(const void* indices, uint64* keys, uint tuples, uint size, Target to) {
    __shared__ uint64 own[MOST_KEYS];
    uint first = blockIdx.x * size;
    for (uint i = threadIdx.x; i < size; i += blockDim.x) {
        uint t = first + i;
        own[i] = t < tuples ? key_of(slot_of(indices, t, to), t) : ~0ull;
    }
    // Bitonic (Batcher, 1968).
    for (uint part = 2; part <= size; part *= 2) {
        for (uint step = part / 2; step > 0; step /= 2) {
            __syncthreads();
            for (uint pair = threadIdx.x; pair < size / 2; pair += blockDim.x) {
                uint low = pair / step * 2 * step + pair % step, high = low + step;
                bool rises = (low & part) == 0;
                uint64 a = own[low], b = own[high];
                if ((a > b) == rises) own[low] = b, own[high] = a;
            }
        }
    }
    __syncthreads();
    for (uint i = threadIdx.x; i < size && first + i < tuples; i += blockDim.x) keys[first + i] = own[i];
}

// Merges each two sorted parts of `width` keys: a key's place is its own and the number of lesser ones in the other part.
extern "C" __global__ void scatter_merge(const uint64* from, uint64* to, uint tuples, uint width) {
    uint i = thread_index();
    if (i >= tuples) return;
    uint part = i / width, other = (part ^ 1) * width, low = min(other, tuples), high = min(other + width, tuples), begin = low;
    uint64 key = from[i];
    while (low < high) {
        uint middle = (low + high) / 2;
        if (from[middle] < key) low = middle + 1;
        else high = middle;
    }
    to[part / 2 * 2 * width + i % width + (low - begin)] = key;
}

enum Fold { ADD, MUL, MIN, MAX };
template <typename V> __device__ inline V combined(uint fold, V a, V b) {
    if (fold == ADD) return a + b;
    if (fold == MUL) return a * b;
    // What is not a number stays.
    if (a != a) return a;
    if (b != b) return b;
    return fold == MIN ? (b < a ? b : a) : (b > a ? b : a);
}

__device__ inline double read(double x) { return x; }
__device__ inline float read(float x) { return x; }
__device__ inline float read(__half x) { return as_float(x); }
__device__ inline float read(__nv_bfloat16 x) { return as_float(x); }
__device__ inline int read(int x) { return x; }
__device__ inline int64 read(int64 x) { return x; }
template <typename T, typename V> __device__ inline T write(V x) { return x; }
template <> __device__ inline __half write<__half, float>(float x) { return from_float<__half>(x); }
template <> __device__ inline __nv_bfloat16 write<__nv_bfloat16, float>(float x) { return from_float<__nv_bfloat16>(x); }

// A thread has an element of the updates of a window of keys. What goes to one slot is combined with what is there where it begins in the window; what
// goes on in the next window, or comes from the one before, is left in `parts`: of each window what comes first, then what comes last.
template <typename T, typename V>
__device__ void scatter_windows(const uint64* keys, const T* updates, T* y, V* parts, uint tuples, uint run, uint window, uint fold) {
    uint windows = (tuples + window - 1) / window;
    for (uint i = thread_index(); i < windows * run; i += gridDim.x * blockDim.x) {
        uint own = i / run, e = i % run, first = own * window, end = min(first + window, tuples);
        uint slot = (uint)(keys[first] >> 32);
        bool comes = first > 0 && (uint)(keys[first - 1] >> 32) == slot;
        V sum = V(0);
        bool is_new = comes;
        if (!comes && slot != NONE) sum = read(y[(uint64)slot * run + e]);
        for (uint at = first; at < end; at++) {
            uint64 key = keys[at];
            uint next = (uint)(key >> 32);
            if (next != slot) {
                if (slot != NONE) {
                    if (comes) parts[((uint64)own * 2) * run + e] = sum;
                    else y[(uint64)slot * run + e] = write<T, V>(sum);
                }
                slot = next, comes = false, is_new = false;
                if (slot != NONE) sum = read(y[(uint64)slot * run + e]);
            }
            if (slot == NONE) continue;
            V value = read(updates[(uint64)(uint)key * run + e]);
            sum = is_new ? value : combined(fold, sum, value);
            is_new = false;
        }
        if (slot == NONE) continue;
        bool goes_on = end < tuples && (uint)(keys[end] >> 32) == slot;
        if (comes) parts[((uint64)own * 2) * run + e] = sum;
        else if (goes_on) parts[((uint64)own * 2 + 1) * run + e] = sum;
        else y[(uint64)slot * run + e] = write<T, V>(sum);
    }
}

// Combines the parts of slots that go on from window to window, in their order: by the window in which one begins.
template <typename T, typename V>
__device__ void scatter_join(const uint64* keys, T* y, const V* parts, uint tuples, uint run, uint window, uint fold) {
    uint windows = (tuples + window - 1) / window;
    for (uint i = thread_index(); i < windows * run; i += gridDim.x * blockDim.x) {
        uint own = i / run, e = i % run, first = own * window, end = min(first + window, tuples);
        uint slot = (uint)(keys[end - 1] >> 32);
        bool goes_on = end < tuples && (uint)(keys[end] >> 32) == slot;
        bool comes = first > 0 && (uint)(keys[first - 1] >> 32) == slot;
        if (slot == NONE || !goes_on || comes) continue;
        V sum = parts[((uint64)own * 2 + 1) * run + e];
        for (uint next = own + 1; next < windows && (uint)(keys[next * window] >> 32) == slot; next++) {
            sum = combined(fold, sum, parts[(uint64)next * 2 * run + e]);
        }
        y[(uint64)slot * run + e] = write<T, V>(sum);
    }
}

#define ENTRIES(NAME, T, V)                                                                                             \
    extern "C" __global__ void scatter_windows_##NAME(const uint64* keys, const T* updates, T* y, V* parts, uint tuples, \
                                                      uint run, uint window, uint fold) {                               \
        scatter_windows(keys, updates, y, parts, tuples, run, window, fold);                                            \
    }                                                                                                                   \
    extern "C" __global__ void scatter_join_##NAME(const uint64* keys, T* y, const V* parts, uint tuples, uint run,      \
                                                   uint window, uint fold) {                                            \
        scatter_join(keys, y, parts, tuples, run, window, fold);                                                        \
    }

ENTRIES(f32, float, float)
ENTRIES(f64, double, double)
ENTRIES(f16, __half, float)
ENTRIES(bf16, __nv_bfloat16, float)
ENTRIES(i32, int, int)
ENTRIES(i64, int64, int64)
