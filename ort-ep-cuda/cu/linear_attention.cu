// Linear attention: a recurrence over a matrix of keys and values for each head. Its columns know nothing of each other: of each, some lanes have
// some rows in registers, from the first time to the last.
#include "codes.cuh"

struct Linear {
    int heads, group, times, key_size, value_size;
    // Blocks of the columns of a head.
    int across;
    // Numbers of decay and beta at a time: of each head, or of each key and of all heads.
    int decay_width, beta_width, state_kind;
    float scale;
};

constexpr int THREADS = 128;

template <int LANES> __device__ inline float sum_of(float x) {
#pragma unroll
    for (int step = LANES / 2; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    return x;
}

template <typename T, int LANES, int ROWS>
__device__ inline void recurrence(const T* q, const T* k, const T* v, const void* past, const T* decay, const T* beta, T* y, void* present,
                                  const Linear& p) {
    int lane = threadIdx.x % LANES, column = blockIdx.x % p.across * (THREADS / LANES) + threadIdx.x / LANES;
    int pair = blockIdx.x / p.across, batch = pair / p.heads, head = pair % p.heads;
    // Threads without a column take part in sums.
    bool there = column < p.value_size;
    uint first = (uint)pair * p.key_size * p.value_size + column;
    float state[ROWS];
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int row = lane + LANES * i;
        state[i] = past && there && row < p.key_size ? float_at(past, p.state_kind, first + row * p.value_size) : 0.0f;
    }
    for (int time = 0; time < p.times; time++) {
        int at = batch * p.times + time, of_head = at * p.heads + head;
        float key[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            int row = lane + LANES * i;
            key[i] = row < p.key_size ? as_float(k[of_head * p.key_size + row]) : 0.0f;
        }
        if (decay && p.decay_width == p.heads) {
            float factor = expf(as_float(decay[of_head]));
#pragma unroll
            for (int i = 0; i < ROWS; i++) state[i] *= factor;
        } else if (decay) {
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                int row = lane + LANES * i;
                if (row < p.key_size) state[i] *= expf(as_float(decay[of_head * p.key_size + row]));
            }
        }
        float update = there ? as_float(v[of_head * p.value_size + column]) : 0.0f;
        if (beta) {
            float known = 0.0f;
#pragma unroll
            for (int i = 0; i < ROWS; i++) known += state[i] * key[i];
            update = (update - sum_of<LANES>(known)) * as_float(beta[p.beta_width == 1 ? at : of_head]);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) state[i] += key[i] * update;
        for (int member = 0; member < p.group; member++) {
            int query = of_head * p.group + member;
            float result = 0.0f;
#pragma unroll
            for (int i = 0; i < ROWS; i++) {
                int row = lane + LANES * i;
                if (row < p.key_size) result += state[i] * as_float(q[query * p.key_size + row]);
            }
            result = sum_of<LANES>(result);
            if (lane == 0 && there && y) y[query * p.value_size + column] = from_float<T>(result * p.scale);
        }
    }
    if (!present || !there) return;
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        int row = lane + LANES * i;
        if (row >= p.key_size) continue;
        uint to = first + row * p.value_size;
        if (p.state_kind == IS_HALF) {
            static_cast<__half*>(present)[to] = from_float<__half>(state[i]);
        } else if (p.state_kind == IS_BFLOAT) {
            static_cast<__nv_bfloat16*>(present)[to] = from_float<__nv_bfloat16>(state[i]);
        } else {
            static_cast<float*>(present)[to] = state[i];
        }
    }
}

#define RECURRENCE(size, suffix, type, lanes, rows)                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                      \
        linear_attention_##size##_##suffix(const type* q, const type* k, const type* v, const void* past,      \
                                           const type* decay, const type* beta, type* y, void* present,        \
                                           Linear p) {                                                         \
        recurrence<type, lanes, rows>(q, k, v, past, decay, beta, y, present, p);                              \
    }
// Keys of up to so many numbers; linear_attention.rs has the same lanes.
#define SIZES(suffix, type)                                                                                    \
    RECURRENCE(64, suffix, type, 8, 8)                                                                         \
    RECURRENCE(256, suffix, type, 8, 32)                                                                       \
    RECURRENCE(1024, suffix, type, 32, 32)

SIZES(f32, float)
SIZES(f16, __half)
SIZES(bf16, __nv_bfloat16)
