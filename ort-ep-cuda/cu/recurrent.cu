// One step of recurrent layers: the products of states with the recurrence weights, and what becomes of them. What comes from the inputs of all
// steps is there already. A warp takes a unit of some sequences: its lanes share the sums, and each then finishes a sequence.
#include "common.cuh"

// Warps of a block.
constexpr uint WARPS = 4;

enum Function { RELU, TANH, SIGMOID, AFFINE, LEAKY_RELU, THRESHOLDED_RELU, SCALED_TANH, HARD_SIGMOID, ELU, SOFTSIGN, SOFTPLUS };

struct Activation {
    int function;
    float alpha, beta;
};

struct Layer {
    int steps, batch, hidden, directions;
    // The direction from which on sequences are read from their end, whether the batch comes before the steps, and whether what an LSTM
    // forgets follows from what it takes in.
    int reverse, batch_first, input_forget;
    // Gates are clipped to so far from zero.
    float clip;
    // f, g and h of each direction.
    Activation activations[2][3];
};

__device__ inline float activate(const Activation& a, float x) {
    switch (a.function) {
    case RELU: return fmaxf(x, 0.0f);
    case TANH: return tanhf(x);
    case SIGMOID: return 1.0f / (1.0f + expf(-x));
    case AFFINE: return a.alpha * x + a.beta;
    case LEAKY_RELU: return x < 0.0f ? a.alpha * x : x;
    case THRESHOLDED_RELU: return x > a.alpha ? x : 0.0f;
    case SCALED_TANH: return a.alpha * tanhf(a.beta * x);
    case HARD_SIGMOID: return fminf(fmaxf(a.alpha * x + a.beta, 0.0f), 1.0f);
    case ELU: return x >= 0.0f ? x : a.alpha * expm1f(x);
    case SOFTSIGN: return x / (1.0f + fabsf(x));
    default: return log1pf(expf(-fabsf(x))) + fmaxf(x, 0.0f);
    }
}

// What a launch does of a step, with the gates of the layer, those whose sums it needs, and the first of them.
enum Phase { LSTM, GRU_LINEAR, GRU_GATES, GRU_CANDIDATE, RNN };
template <int PHASE> struct Gates;
template <> struct Gates<LSTM> { static constexpr int ALL = 4, OWN = 4, FIRST = 0, JOINED = 4; };
template <> struct Gates<GRU_LINEAR> { static constexpr int ALL = 3, OWN = 3, FIRST = 0, JOINED = 2; };
template <> struct Gates<GRU_GATES> { static constexpr int ALL = 3, OWN = 2, FIRST = 0, JOINED = 3; };
template <> struct Gates<GRU_CANDIDATE> { static constexpr int ALL = 3, OWN = 1, FIRST = 2, JOINED = 3; };
template <> struct Gates<RNN> { static constexpr int ALL = 1, OWN = 1, FIRST = 0, JOINED = 1; };

// Where a slot of states begins that is multiplied, and one that results go to; slots are `size` apart.
struct Slots {
    uint step, from, to, size;
};

__device__ inline uint state_row(const Layer& p, uint direction, uint sequence) {
    return p.batch_first ? sequence * p.directions + direction : direction * p.batch + sequence;
}

// A unit of a sequence at a step.
template <int PHASE, typename T> struct Unit {
    const T *inputs, *bias, *peepholes;
    const Layer& p;
    uint direction, unit, row;

    __device__ float clipped(float x) const { return x < -p.clip ? -p.clip : x > p.clip ? p.clip : x; }
    __device__ float activated(int which, float x) const { return activate(p.activations[direction][which], x); }
    // The biases of inputs are followed by those of states.
    __device__ float bias_of(int number) const {
        return bias ? as_float(bias[(direction * 2 * Gates<PHASE>::ALL + number) * p.hidden + unit]) : 0.0f;
    }
    // What comes from the input for a gate, with its biases.
    __device__ float input(int gate) const {
        uint at = ((row * p.directions + direction) * Gates<PHASE>::ALL + gate) * p.hidden + unit;
        float x = as_float(inputs[at]) + bias_of(gate);
        return gate < Gates<PHASE>::JOINED ? x + bias_of(Gates<PHASE>::ALL + gate) : x;
    }
    __device__ float peephole(int gate) const {
        return peepholes ? as_float(peepholes[(direction * 3 + gate) * p.hidden + unit]) : 0.0f;
    }
};

// The new state of a unit whose sums are these. Slot 2 has the cell states of an LSTM (gates: input, output, forget, cell); of a GRU (update,
// reset, hidden) in two phases, slot 1 has the update gates, and slot 2 what the last gate is multiplied with.
template <int PHASE, typename T>
__device__ inline float new_state(const Unit<PHASE, T>& u, const float (&sums)[Gates<PHASE>::OWN], float* state,
                                  const Slots& slots, uint at) {
    if constexpr (PHASE == LSTM) {
        float& cell = state[2 * slots.size + at];
        float c = cell, i = u.activated(0, u.clipped(sums[0] + u.input(0) + u.peephole(0) * c));
        float forget = 1.0f - i;
        if (!u.p.input_forget) forget = u.activated(0, u.clipped(sums[2] + u.input(2) + u.peephole(2) * c));
        float now = forget * c + i * u.activated(1, u.clipped(sums[3] + u.input(3)));
        cell = now;
        return u.activated(0, u.clipped(sums[1] + u.input(1) + u.peephole(1) * now)) * u.activated(2, now);
    } else if constexpr (PHASE == GRU_LINEAR) {
        float update = u.activated(0, u.clipped(sums[0] + u.input(0)));
        float reset = u.activated(0, u.clipped(sums[1] + u.input(1)));
        float candidate = u.activated(1, u.clipped(u.input(2) + reset * (sums[2] + u.bias_of(5))));
        return (1.0f - update) * candidate + update * state[slots.from + at];
    } else if constexpr (PHASE == GRU_CANDIDATE) {
        float update = state[slots.size + at], candidate = u.activated(1, u.clipped(sums[0] + u.input(2)));
        return (1.0f - update) * candidate + update * state[at];
    } else {
        return u.activated(0, u.clipped(sums[0] + u.input(0)));
    }
}

// `bias`, `peepholes`, `lengths` and `y` may be null pointers.
template <int PHASE, int SEQUENCES, typename T>
__device__ inline void take_step(const T* inputs, const T* recurrence, const T* bias, const T* peepholes, const int* lengths,
                                 float* state, T* y, const Layer& p, const Slots& slots) {
    using G = Gates<PHASE>;
    uint unit = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32, hidden = p.hidden;
    uint first = blockIdx.y * SEQUENCES, direction = blockIdx.z;
    if (unit >= hidden) return;
    const T* weights = recurrence + ((direction * G::ALL + G::FIRST) * hidden + unit) * hidden;
    float sums[SEQUENCES][G::OWN] = {};
    for (uint k = lane; k < hidden; k += 32) {
        float w[G::OWN];
#pragma unroll
        for (int g = 0; g < G::OWN; g++) w[g] = as_float(weights[g * hidden * hidden + k]);
#pragma unroll
        for (int s = 0; s < SEQUENCES; s++) {
            if (first + s >= p.batch) continue;
            float h = state[slots.from + state_row(p, direction, first + s) * hidden + k];
#pragma unroll
            for (int g = 0; g < G::OWN; g++) sums[s][g] += w[g] * h;
        }
    }
    float own[G::OWN];
#pragma unroll
    for (int g = 0; g < G::OWN; g++) {
        own[g] = 0.0f;
#pragma unroll
        for (int s = 0; s < SEQUENCES; s++) {
            float whole = warp_sum(sums[s][g]);
            own[g] = lane == s ? whole : own[g];
        }
    }
    uint sequence = first + lane;
    if (lane >= SEQUENCES || sequence >= p.batch) return;
    uint end = lengths ? min(max(lengths[sequence], 0), p.steps) : p.steps, time = slots.step;
    bool goes_on = time < end;
    if (goes_on && direction >= p.reverse) time = end - 1 - time;
    uint row = p.batch_first ? sequence * p.steps + time : time * p.batch + sequence;
    uint at = state_row(p, direction, sequence) * hidden + unit;
    Unit<PHASE, T> u{inputs, bias, peepholes, p, direction, unit, row};
    if constexpr (PHASE == GRU_GATES) {
        state[slots.size + at] = u.activated(0, u.clipped(own[0] + u.input(0)));
        state[2 * slots.size + at] = u.activated(0, u.clipped(own[1] + u.input(1))) * state[at];
    } else {
        // The states of a sequence that has ended stay, and its results are zero.
        float now = state[(PHASE == GRU_CANDIDATE ? 0 : slots.from) + at], shown = 0.0f;
        if (goes_on) now = shown = new_state<PHASE, T>(u, own, state, slots, at);
        state[slots.to + at] = now;
        if (!y) return;
        uint to = p.batch_first ? row * p.directions + direction : (time * p.directions + direction) * p.batch + sequence;
        y[to * hidden + unit] = from_float<T>(shown);
    }
}

// The states before the first step: of units in slot 0, of cells in slot 2. What is not given is zero.
template <typename T> __device__ inline void first_states(const T* h, const T* c, float* state, uint size) {
    uint index = thread_index();
    if (index >= size) return;
    state[index] = h ? as_float(h[index]) : 0.0f;
    state[2 * size + index] = c ? as_float(c[index]) : 0.0f;
}

// The states behind the last step, where they are wanted.
template <typename T> __device__ inline void last_states(const float* state, T* h, T* c, uint slot, uint size) {
    uint index = thread_index();
    if (index >= size) return;
    if (h) h[index] = from_float<T>(state[slot + index]);
    if (c) c[index] = from_float<T>(state[2 * size + index]);
}

#define STEP(NAME, PHASE, SEQUENCES, suffix, T)                                                                     \
    extern "C" __global__ void __launch_bounds__(32 * WARPS) recurrent_##NAME##_##SEQUENCES##_##suffix(             \
        const T* inputs, const T* recurrence, const T* bias, const T* peepholes, const int* lengths, float* state,  \
        T* y, Layer p, Slots slots) {                                                                               \
        take_step<PHASE, SEQUENCES, T>(inputs, recurrence, bias, peepholes, lengths, state, y, p, slots);           \
    }
#define STEPS(NAME, PHASE, suffix, T) STEP(NAME, PHASE, 1, suffix, T) STEP(NAME, PHASE, 8, suffix, T)
#define ALL(suffix, T)                                                                                              \
    STEPS(lstm, LSTM, suffix, T)                                                                                    \
    STEPS(gru_linear, GRU_LINEAR, suffix, T)                                                                        \
    STEPS(gru_gates, GRU_GATES, suffix, T)                                                                          \
    STEPS(gru_candidate, GRU_CANDIDATE, suffix, T)                                                                  \
    STEPS(rnn, RNN, suffix, T)                                                                                      \
    extern "C" __global__ void first_states_##suffix(const T* h, const T* c, float* state, uint size) {             \
        first_states<T>(h, c, state, size);                                                                         \
    }                                                                                                               \
    extern "C" __global__ void last_states_##suffix(const float* state, T* h, T* c, uint slot, uint size) {         \
        last_states<T>(state, h, c, slot, size);                                                                    \
    }

ALL(f32, float)
ALL(f16, __half)
ALL(bf16, __nv_bfloat16)
