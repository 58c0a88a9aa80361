// Steps of optimizers, in the parameter's own type. What a step is told in one number (learning rate, scale, whether anything changes, the
// number of the step) is read here, so that the host waits for nothing; the first thread of a block computes the factors, in doubles.
//
// New values go where old ones lie, or elsewhere; the address of nothing says that nobody wants them. Sums of squares are of doubles: each
// block writes its own, and who needs the whole adds them up in their order.
#include "lines.cuh"

// A gradient of any type, as a number to compute with.
__device__ inline double wide(double x) { return x; }
__device__ inline float wide(float x) { return x; }
__device__ inline float wide(__half x) { return as_float(x); }
__device__ inline float wide(__nv_bfloat16 x) { return as_float(x); }

__device__ inline float root(float x) { return sqrtf(x); }
__device__ inline double root(double x) { return sqrt(x); }

// Four elements, read and written by as few instructions as there are.
template <typename T> struct alignas(sizeof(T) > 4 ? 16 : 4 * sizeof(T)) Four { T of[4]; };

template <typename T> __device__ inline bool in_fours(const T* at) { return (uint64)at % alignof(Four<T>) == 0; }
template <typename T> __device__ inline void read_four(const T* at, int count, bool whole, Four<T>& to) {
    if (whole) {
        to = *(const Four<T>*)at;
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) to.of[j] = j < count ? at[j] : T(0.0f);
}

// The elements of a launch, and those of them that have a gradient, of which the first is that of `first`.
struct Range { uint begin, count, first, rows; };

// A parameter, then its states.
template <typename T, int COUNT> struct Tensors {
    const T* from[COUNT];
    T* to[COUNT];
};

__device__ inline bool is_set(const uint8* flag) { return !flag || *flag != 0; }
__device__ inline double number_of(const float* told, double otherwise) { return told ? double(*told) : otherwise; }

// Calls `step` with each element of the tensors and of the gradient; without an update all stays as it is.
template <typename T, typename G, int COUNT, typename Step>
__device__ void update_all(const Tensors<T, COUNT>& tensors, const G* gradient, const Range& range, bool updates, const Step& step) {
    const G* gradients = gradient + ((int64)range.begin - range.first);
    bool fours = in_fours(gradients), stays = !updates;
#pragma unroll
    for (int n = 0; n < COUNT; n++) {
        fours = fours && in_fours(tensors.from[n] + range.begin) && in_fours(tensors.to[n] + range.begin);
        stays = stays && (!tensors.to[n] || tensors.to[n] == tensors.from[n]);
    }
    if (stays) return;
    for (uint at = 4 * thread_index(); at < range.count; at += 4 * gridDim.x * blockDim.x) {
        uint i = range.begin + at, end = range.first + range.rows;
        int count = min(4u, range.count - at);
        bool whole = fours && count == 4;
        Four<T> values[COUNT];
#pragma unroll
        for (int n = 0; n < COUNT; n++) read_four(tensors.from[n] + i, count, whole, values[n]);
        if (updates) {
            Four<G> four;
            if (i >= range.first && i + count <= end) {
                read_four(gradients + at, count, whole, four);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) four.of[j] = j < count && i + j >= range.first && i + j < end ? gradients[at + j] : G(0.0f);
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j >= count || i + j < range.first || i + j >= end) continue;
                T own[COUNT];
#pragma unroll
                for (int n = 0; n < COUNT; n++) own[n] = values[n].of[j];
                step(own, T(wide(four.of[j])));
#pragma unroll
                for (int n = 0; n < COUNT; n++) values[n].of[j] = own[n];
            }
        }
#pragma unroll
        for (int n = 0; n < COUNT; n++) {
            if (!tensors.to[n]) continue;
            if (whole) {
                *(Four<T>*)(tensors.to[n] + i) = values[n];
                continue;
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                if (j < count) tensors.to[n][i + j] = values[n].of[j];
            }
        }
    }
}

// Stochastic gradient descent; the kernels' attributes are as `optimizer.rs` writes them.
struct SgdRule { double momentum, decay; int64 nesterov; };

template <typename T> struct Sgd {
    T rate, scale, momentum, decay;
    bool nesterov;

    __device__ T gradient(T x, T g) const {
        g = g * scale;
        return decay == T(0) ? g : g + decay * x;
    }
    __device__ void operator()(T (&own)[1], T g) const { own[0] = own[0] - rate * gradient(own[0], g); }
    __device__ void operator()(T (&own)[2], T g) const {
        g = gradient(own[0], g);
        own[1] = own[1] * momentum + g;
        own[0] = own[0] - rate * (nesterov ? g + momentum * own[1] : own[1]);
    }
};

template <typename T, typename G>
__device__ void sgd(const T* x, const T* v, T* new_x, T* new_v, const G* gradient, const float* rate, const float* scale,
                    const uint8* update, const Range& range, const SgdRule& rule) {
    Sgd<T> step = {T(number_of(rate, 0.0)), T(number_of(scale, 1.0)), T(rule.momentum), T(rule.decay), rule.nesterov != 0};
    if (v) {
        update_all(Tensors<T, 2>{{x, v}, {new_x, new_v}}, gradient, range, is_set(update), step);
    } else {
        update_all(Tensors<T, 1>{{x}, {new_x}}, gradient, range, is_set(update), step);
    }
}

// Adam in all of its forms: what a form leaves out is 1, or 0 where it is added.
enum Mode { TORCH, HUGGING_FACE, ADAM };
struct AdamRule { double beta1, beta2, epsilon, decay; int mode, corrects; };

template <typename T> struct Adam {
    T scale, gradient_decay, kept_before, kept_after, beta1, beta2, rest1, rest2, bias_root, epsilon, size;

    __device__ void set(const AdamRule& rule, double rate, double by, double bias1, double bias2) {
        double kept = 1.0 - rate * rule.decay;
        scale = T(by);
        gradient_decay = T(rule.mode == ADAM ? rule.decay : 0.0);
        kept_before = T(rule.mode == TORCH ? kept : 1.0);
        kept_after = T(rule.mode == HUGGING_FACE ? kept : 1.0);
        beta1 = T(rule.beta1), beta2 = T(rule.beta2), rest1 = T(1.0 - rule.beta1), rest2 = T(1.0 - rule.beta2);
        bias_root = T(rule.mode == HUGGING_FACE ? 1.0 : sqrt(bias2));
        size = T(rule.mode == HUGGING_FACE ? rate / bias1 * sqrt(bias2) : rate / bias1);
        epsilon = T(rule.epsilon);
    }
    // The first moment goes from the nearer end.
    __device__ void moments(T& m, T& v, T g) const {
        T way = g - m;
        m = beta1 > rest1 ? m + rest1 * way : g - way * beta1;
        v = v * beta2 + rest2 * g * g;
    }
    __device__ void operator()(T (&own)[3], T g) const {
        g = g * scale;
        if (gradient_decay != T(0)) g = g + gradient_decay * own[0];
        moments(own[1], own[2], g);
        T denominator = root(own[2]) / bias_root + epsilon;
        own[0] = (own[0] * kept_before - size * own[1] / denominator) * kept_after;
    }
};

// One minus what is left of a moment's beginning.
__device__ inline double bias_of(double beta, const AdamRule& rule, const int64* step) {
    return rule.corrects ? 1.0 - pow(beta, double(*step)) : 1.0;
}

// The factors of a step, in the memory that a block shares.
template <typename T>
__device__ inline void share(Adam<T>& step, const AdamRule& rule, const float* rate, const float* scale, const int64* number) {
    if (threadIdx.x == 0) {
        step.set(rule, number_of(rate, 0.0), number_of(scale, 1.0), bias_of(rule.beta1, rule, number), bias_of(rule.beta2, rule, number));
    }
    __syncthreads();
}

template <typename T, typename G>
__device__ void adam(const T* x, const T* m, const T* v, T* new_x, T* new_m, T* new_v, const G* gradient, const float* rate,
                     const float* scale, const uint8* update, const int64* number, const Range& range, const AdamRule& rule) {
    __shared__ Adam<T> step;
    share(step, rule, rate, scale, number);
    update_all(Tensors<T, 3>{{x, m, v}, {new_x, new_m, new_v}}, gradient, range, is_set(update), step);
}

// Moments as codes of 8 bits: 256 elements have a scale, and a block takes them at once. Codes stand, in order, for dynamic numbers: 0, 1, and
// in between, or on both sides of 0, for the middles of equal parts of 0.1 to 1 times a power of ten (Dettmers et al., arXiv 2110.02861).
__device__ inline float value_of_code(int code, bool is_signed) {
    // Powers of ten from 10^-6 to 10^0, of which each has twice the parts of the one before.
    const double powers[7] = {1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0};
    int zero = is_signed ? 127 : 0;
    if (code == 255) return 1.0f;
    if (code == zero) return 0.0f;
    int first = is_signed ? 1 : 2, rank = (code > zero ? code - zero : zero - code) - 1 + first;
    int bits = 31 - __clz(rank), parts = 1 << bits;
    double fraction = 0.1 + 0.9 * (rank - parts + 0.5) / parts, number = 0.0;
#pragma unroll
    for (int exponent = 0; exponent < 7; exponent++) {
        if (exponent == bits - first + 1) number = fraction * powers[exponent];
    }
    return float(code > zero ? number : -number);
}

// The code of the nearest number to one of magnitude up to 1, the lesser of two that are as near; `middles` lie between the numbers.
__device__ inline uint8 nearest_code(const float* middles, float x) {
    if (x != x) return 255;
    int below = 0;
#pragma unroll
    for (int step = 128; step > 0; step /= 2) {
        if (middles[below + step - 1] < x) below += step;
    }
    return below;
}

template <typename T> __device__ inline void write_codes(T moment, bool there, uint i, uint block, uint8* codes, float* scales, const float* middles) {
    float x = there ? float(moment) : 0.0f;
    float most = joined<256>(fabsf(x), [](float a, float b) { return greater(a, b); });
    if (there && codes) codes[i] = nearest_code(middles, x / (most == 0.0f ? 1.0f : most));
    if (threadIdx.x == 0 && scales) scales[block] = most;
}

template <typename T, typename G>
__device__ void adam_8bit(const T* x, T* new_x, const uint8* codes1, const float* scales1, const uint8* codes2, const float* scales2,
                          uint8* new_codes1, float* new_scales1, uint8* new_codes2, float* new_scales2, const G* gradient,
                          const float* rate, const float* scale, const uint8* update, const int64* number, uint count,
                          const AdamRule& rule) {
    __shared__ Adam<T> step;
    __shared__ float values[2][256], middles[2][256];
    bool updates = is_set(update);
    if (updates) share(step, rule, rate, scale, number);
    int thread = threadIdx.x;
    for (int own = 0; own < 2; own++) values[own][thread] = value_of_code(thread, own == 0);
    __syncthreads();
    for (int own = 0; own < 2; own++) {
        middles[own][thread] = thread < 255 ? (values[own][thread] + values[own][thread + 1]) / 2.0f : infinity();
    }
    __syncthreads();
    for (uint block = blockIdx.x; block < (count + 255) / 256; block += gridDim.x) {
        uint i = block * 256 + thread;
        bool there = i < count;
        float scale1 = scales1[block], scale2 = scales2[block];
        uint8 code1 = there ? codes1[i] : 0, code2 = there ? codes2[i] : 0;
        T own[3] = {there ? x[i] : T(0), T(values[0][code1] * scale1), T(values[1][code2] * scale2)};
        if (updates) {
            if (there) step(own, T(wide(gradient[i])));
            if (there && new_x) new_x[i] = own[0];
            // All have read the scales.
            write_codes(own[1], there, i, block, new_codes1, new_scales1, middles[0]);
            write_codes(own[2], there, i, block, new_codes2, new_scales2, middles[1]);
            continue;
        }
        if (there && new_x) new_x[i] = own[0];
        if (there && new_codes1) new_codes1[i] = code1;
        if (there && new_codes2) new_codes2[i] = code2;
        if (thread == 0 && new_scales1) new_scales1[block] = scale1;
        if (thread == 0 && new_scales2) new_scales2[block] = scale2;
    }
}

// The sum of a value of each thread of a block, in all of them.
__device__ inline double block_sum(double x) {
    return joined<256>(x, [](double a, double b) { return a + b; });
}

// The sum of what all blocks wrote, which every block adds in the same order. Two sums lie behind each other.
__device__ inline double total(const double* parts, uint count) {
    double sum = 0.0;
    for (uint part = threadIdx.x; part < count; part += 256) sum += parts[part];
    return block_sum(sum);
}

__device__ inline void write_parts(double* parts, double first, double second) {
    first = block_sum(first), second = block_sum(second);
    if (threadIdx.x == 0) parts[blockIdx.x] = first, parts[gridDim.x + blockIdx.x] = second;
}

// Adam whose step is as long as the parameter allows: the moments, with the squares of the parameter and of its update, then the parameter.
template <typename T> struct Lamb {
    Adam<T> adam;
    T bias1, bias2, decay;

    __device__ T update(T x, T m, T v) const {
        T change = (m / bias1) / (root(v / bias2) + adam.epsilon);
        return decay == T(0) ? change : change + decay * x;
    }
};

template <typename T>
__device__ inline void share(Lamb<T>& step, const AdamRule& rule, const float* rate, const float* scale, const int64* number) {
    if (threadIdx.x == 0) {
        double bias1 = bias_of(rule.beta1, rule, number), bias2 = bias_of(rule.beta2, rule, number);
        step.adam.set(rule, number_of(rate, 0.0), number_of(scale, 1.0), bias1, bias2);
        step.bias1 = T(bias1), step.bias2 = T(bias2), step.decay = T(rule.decay);
    }
    __syncthreads();
}

template <typename T, typename G>
__device__ void lamb_moments(const T* x, const T* m, const T* v, T* new_m, T* new_v, const G* gradient, const float* scale,
                             const uint8* update, const int64* number, double* parts, uint count, const AdamRule& rule) {
    __shared__ Lamb<T> step;
    bool updates = is_set(update);
    if (updates) share(step, rule, nullptr, scale, number);
    double squares = 0.0, changes = 0.0;
#pragma unroll 4
    for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) {
        T first = m[i], second = v[i];
        if (updates) {
            T own = x[i];
            step.adam.moments(first, second, T(wide(gradient[i])) * step.adam.scale);
            T change = step.update(own, first, second);
            squares += double(own) * double(own);
            changes += double(change) * double(change);
        }
        new_m[i] = first;
        new_v[i] = second;
    }
    write_parts(parts, squares, changes);
}

template <typename T>
__device__ void lamb_apply(const T* x, T* new_x, const T* m, const T* v, const float* rate, const uint8* update, const int64* number,
                           const double* parts, uint count, uint blocks, double most, const AdamRule& rule) {
    __shared__ Lamb<T> step;
    bool updates = is_set(update);
    if (!updates && x == new_x) return;
    T size = T(0);
    if (updates) {
        share(step, rule, rate, nullptr, number);
        double norm = sqrt(total(parts, blocks)), change = sqrt(total(parts + blocks, blocks));
        double ratio = norm == 0.0 || change == 0.0 ? 1.0 : fmin(norm / change, most);
        size = T(number_of(rate, 0.0) * ratio);
    }
#pragma unroll 4
    for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) {
        T own = x[i];
        new_x[i] = updates ? own - size * step.update(own, m[i], v[i]) : own;
    }
}

// Adafactor: means of the squared gradients over rows and over columns, or of each element where the parameter is no matrix, then the update,
// which is computed twice: for its norm, and to change the parameter.
struct FactorRule { double beta2_decay, epsilon1, epsilon2, threshold, decay; };

// Some matrices of one size, or one row of elements.
struct Matrices { uint count, rows, columns, factored; };

template <typename T> __device__ inline T nearer(T from, T to, T weight) {
    T way = to - from;
    return weight < T(0.5) ? from + weight * way : to - way * (T(1) - weight);
}

// How far moments go to what is new, in the memory that a block shares.
template <typename T> __device__ inline T weight_of(const FactorRule& rule, const int64* step) {
    __shared__ T weight;
    if (threadIdx.x == 0) weight = T(pow(double(*step), rule.beta2_decay));
    __syncthreads();
    return weight;
}

template <typename T, typename G>
__device__ void factor_each(const T* old, T* now, const G* gradient, const float* scale, const uint8* update, const int64* step, uint count,
                            const FactorRule& rule) {
    bool updates = is_set(update);
    if (!updates && old == now) return;
    T weight = updates ? weight_of<T>(rule, step) : T(0), by = T(number_of(scale, 1.0));
    for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) {
        T g = updates ? T(wide(gradient[i])) * by : T(0);
        now[i] = updates ? nearer(old[i], g * g, weight) : old[i];
    }
}

// A team for a row.
template <int TEAM, typename T, typename G>
__device__ void factor_rows(const T* old, T* now, const G* gradient, const float* scale, const uint8* update, const int64* step,
                            const Matrices& matrices, const FactorRule& rule) {
    bool updates = is_set(update);
    if (!updates && old == now) return;
    T weight = updates ? weight_of<T>(rule, step) : T(0);
    uint row = line_of_team<TEAM>(), rows = matrices.count * matrices.rows, lane = lane_of_team<TEAM>();
    double by = number_of(scale, 1.0), sum = 0.0;
    for (uint column = lane; updates && row < rows && column < matrices.columns; column += TEAM) {
        double g = double(T(wide(gradient[row * matrices.columns + column])));
        sum += g * g;
    }
    sum = joined<TEAM>(sum, [](double a, double b) { return a + b; });
    if (row >= rows || lane != 0) return;
    now[row] = updates ? nearer(old[row], T(sum * by * by / matrices.columns), weight) : old[row];
}

// A team for a column of a matrix, or for a part of its rows: `gridDim.y` parts, whose sums lie behind each other.
template <int TEAM, typename T, typename G>
__device__ void factor_columns(const G* gradient, const uint8* update, double* parts, const Matrices& matrices) {
    if (!is_set(update)) return;
    uint line = line_of_team<TEAM>(), lines = matrices.count * matrices.columns;
    uint matrix = line / matrices.columns, column = line % matrices.columns;
    uint each = (matrices.rows + gridDim.y - 1) / gridDim.y, first = blockIdx.y * each, end = min(first + each, matrices.rows);
    double sum = 0.0;
    for (uint row = first + lane_of_team<TEAM>(); line < lines && row < end; row += TEAM) {
        double g = double(T(wide(gradient[(matrix * matrices.rows + row) * matrices.columns + column])));
        sum += g * g;
    }
    sum = joined<TEAM>(sum, [](double a, double b) { return a + b; });
    if (line < lines && lane_of_team<TEAM>() == 0) parts[(uint64)blockIdx.y * lines + line] = sum;
}

template <typename T>
__device__ void factor_join(const double* parts, uint splits, const T* old, T* now, const float* scale, const uint8* update, const int64* step,
                            const Matrices& matrices, const FactorRule& rule) {
    bool updates = is_set(update);
    if (!updates && old == now) return;
    T weight = updates ? weight_of<T>(rule, step) : T(0);
    double by = number_of(scale, 1.0);
    uint lines = matrices.count * matrices.columns;
    for (uint i = thread_index(); i < lines; i += gridDim.x * blockDim.x) {
        double sum = 0.0;
        for (uint part = 0; updates && part < splits; part++) sum += parts[(uint64)part * lines + i];
        now[i] = updates ? nearer(old[i], T(sum * by * by / matrices.rows), weight) : old[i];
    }
}

// The mean of the moments of a matrix's rows, by a team for each matrix.
template <int TEAM, typename T>
__device__ void factor_means(const T* rows, T* means, const uint8* update, const Matrices& matrices, const FactorRule& rule) {
    if (!is_set(update)) return;
    uint matrix = line_of_team<TEAM>();
    double sum = 0.0;
    for (uint row = lane_of_team<TEAM>(); matrix < matrices.count && row < matrices.rows; row += TEAM) {
        sum += double(rows[matrix * matrices.rows + row]);
    }
    sum = joined<TEAM>(sum, [](double a, double b) { return a + b; });
    if (matrix >= matrices.count || lane_of_team<TEAM>() != 0) return;
    T mean = T(sum / matrices.rows), least = T(rule.epsilon1);
    means[matrix] = mean < least ? least : mean;
}

// The update of an element by the estimate of its second moment: `moments` are of rows, or the second moments themselves.
template <typename T, typename G>
__device__ inline T factor_update(uint i, const T* moments, const T* columns, const T* means, const G* gradient, T scale, T least,
                                  const Matrices& matrices) {
    T estimate;
    if (matrices.factored) {
        uint row = i / matrices.columns, matrix = row / matrices.rows;
        estimate = moments[row] * columns[matrix * matrices.columns + i % matrices.columns] / means[matrix];
    } else {
        estimate = moments[i];
    }
    // A comparison that is false for what is no number keeps it.
    estimate = estimate < least ? least : estimate;
    return (T(1) / root(estimate)) * (T(wide(gradient[i])) * scale);
}

template <typename T, typename G>
__device__ void factor_norms(const T* x, const T* moments, const T* columns, const T* means, const G* gradient, const float* scale,
                             const uint8* update, double* parts, uint count, const Matrices& matrices, const FactorRule& rule) {
    if (!is_set(update)) return;
    T by = T(number_of(scale, 1.0)), least = T(rule.epsilon1 * rule.epsilon1);
    double squares = 0.0, changes = 0.0;
#pragma unroll 2
    for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) {
        double own = double(x[i]), change = double(factor_update(i, moments, columns, means, gradient, by, least, matrices));
        squares += own * own;
        changes += change * change;
    }
    write_parts(parts, squares, changes);
}

template <typename T, typename G>
__device__ void factor_apply(const T* x, T* new_x, const T* moments, const T* columns, const T* means, const G* gradient, const float* rate,
                             const float* scale, const uint8* update, const int64* step, const double* parts, uint count, uint blocks,
                             const Matrices& matrices, const FactorRule& rule) {
    bool updates = is_set(update);
    if (!updates && x == new_x) return;
    T by = T(number_of(scale, 1.0)), least = T(rule.epsilon1 * rule.epsilon1), kept = T(0), size = T(0);
    if (updates) {
        double many = sqrt(double(count)), norm = sqrt(total(parts, blocks)) / many, change = sqrt(total(parts + blocks, blocks)) / many;
        double length = fmax(norm, rule.epsilon2) * fmin(number_of(rate, 0.0), 1.0 / sqrt(double(*step)));
        size = T(length / fmax(change / rule.threshold, 1.0));
        kept = T(1.0 - number_of(rate, 0.0) * rule.decay);
    }
#pragma unroll 2
    for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) {
        T own = x[i];
        new_x[i] = updates ? own * kept - size * factor_update(i, moments, columns, means, gradient, by, least, matrices) : own;
    }
}

// Sums of gradients over batches.
template <typename T> struct Added {
    bool overwrites;
    __device__ void operator()(T (&own)[1], T g) const { own[0] = overwrites ? g : own[0] + g; }
};

// The standard's optimizers, each element in doubles and rounded once: Adagrad, Adam and Momentum. `count` is that of the iterations before.
enum Standard { ADAGRAD, STANDARD_ADAM, MOMENTUM, NESTEROV };
struct StandardRule { double norm, alpha, beta, epsilon, decay, norm_post; };

template <typename T>
__device__ void standard(const T* x, const T* gradient, const T* state1, const T* state2, T* new_x, T* new_state1, T* new_state2,
                         const void* rate_at, const int64* count_at, uint rate_is_double, uint kind, uint count, const StandardRule& rule) {
    __shared__ double factor;
    if (threadIdx.x == 0) {
        double rate = rate_is_double ? *(const double*)rate_at : double(*(const float*)rate_at), done = double(*count_at);
        if (kind == ADAGRAD) rate = rate / (1.0 + done * rule.decay);
        if (kind == STANDARD_ADAM && *count_at > 0) rate = rate * sqrt(1.0 - pow(rule.beta, done)) / (1.0 - pow(rule.alpha, done));
        factor = rate;
    }
    __syncthreads();
    double rate = factor, beta = *count_at > 0 ? rule.beta : 1.0;
    for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) {
        double own = x[i], g = rule.norm * own + gradient[i], first = state1[i], second = state2 ? double(state2[i]) : 0.0;
        if (kind == ADAGRAD) {
            first = first + g * g;
            own = own - rate * g / (sqrt(first) + rule.epsilon);
        } else if (kind == STANDARD_ADAM) {
            first = rule.alpha * first + (1.0 - rule.alpha) * g;
            second = rule.beta * second + (1.0 - rule.beta) * g * g;
            own = (1.0 - rule.norm_post) * (own - rate * first / (sqrt(second) + rule.epsilon));
        } else {
            first = rule.alpha * first + beta * g;
            own = own - rate * (kind == NESTEROV ? g + rule.alpha * first : first);
        }
        if (new_x) new_x[i] = T(own);
        if (new_state1) new_state1[i] = T(first);
        if (new_state2) new_state2[i] = T(second);
    }
}

// One number of all gradients: a row of blocks has the parts of up to eight of them, `optimizer.rs` has the same kinds.
enum Kind { FLOAT, DOUBLE, HALF, BFLOAT };
struct Eight { uint counts[8]; uint kinds[8]; };

template <bool FINITE, typename G> __device__ inline double part_of(const G* gradient, uint count) {
    double sum = 0.0;
#pragma unroll 4
    for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) {
        double x = double(wide(gradient[i]));
        if (FINITE) sum += isfinite(x) ? 0.0 : 1.0;
        else sum += x * x;
    }
    return sum;
}

template <bool FINITE> __device__ inline void parts_of_eight(const void* const (&gradients)[8], double* parts, const Eight& eight) {
    const void* own = nullptr;
    uint count = 0, kind = 0;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        if (blockIdx.y == n) own = gradients[n], count = eight.counts[n], kind = eight.kinds[n];
    }
    double sum = 0.0;
    if (kind == FLOAT) sum = part_of<FINITE>((const float*)own, count);
    else if (kind == DOUBLE) sum = part_of<FINITE>((const double*)own, count);
    else if (kind == HALF) sum = part_of<FINITE>((const __half*)own, count);
    else sum = part_of<FINITE>((const __nv_bfloat16*)own, count);
    sum = block_sum(sum);
    if (threadIdx.x == 0) parts[blockIdx.y * gridDim.x + blockIdx.x] = sum;
}

extern "C" __global__ void all_squares(const void* a, const void* b, const void* c, const void* d, const void* e, const void* f, const void* g,
                                       const void* h, double* parts, Eight eight) {
    parts_of_eight<false>({a, b, c, d, e, f, g, h}, parts, eight);
}
extern "C" __global__ void all_infinite(const void* a, const void* b, const void* c, const void* d, const void* e, const void* f, const void* g,
                                        const void* h, double* parts, Eight eight) {
    parts_of_eight<true>({a, b, c, d, e, f, g, h}, parts, eight);
}
extern "C" __global__ void norm_of_parts(const double* parts, float* norm, uint count) {
    double sum = total(parts, count);
    if (threadIdx.x == 0) *norm = float(sqrt(sum));
}
extern "C" __global__ void finite_of_parts(const double* parts, uint8* finite, uint count) {
    double sum = total(parts, count);
    if (threadIdx.x == 0) *finite = sum == 0.0;
}

#define OF_GRADIENT(NAME, T, G)                                                                                                   \
    extern "C" __global__ void sgd_##NAME(const T* x, const T* v, T* new_x, T* new_v, const G* gradient, const float* rate,        \
                                          const float* scale, const uint8* update, Range range, SgdRule rule) {                   \
        sgd(x, v, new_x, new_v, gradient, rate, scale, update, range, rule);                                                      \
    }                                                                                                                             \
    extern "C" __global__ void adam_##NAME(const T* x, const T* m, const T* v, T* new_x, T* new_m, T* new_v, const G* gradient,    \
                                           const float* rate, const float* scale, const uint8* update, const int64* step,         \
                                           Range range, AdamRule rule) {                                                          \
        adam(x, m, v, new_x, new_m, new_v, gradient, rate, scale, update, step, range, rule);                                     \
    }                                                                                                                             \
    extern "C" __global__ void __launch_bounds__(256)                                                                             \
        adam_8bit_##NAME(const T* x, T* new_x, const uint8* codes1, const float* scales1, const uint8* codes2,                    \
                         const float* scales2, uint8* new_codes1, float* new_scales1, uint8* new_codes2, float* new_scales2,      \
                         const G* gradient, const float* rate, const float* scale, const uint8* update, const int64* step,        \
                         uint count, AdamRule rule) {                                                                             \
        adam_8bit(x, new_x, codes1, scales1, codes2, scales2, new_codes1, new_scales1, new_codes2, new_scales2, gradient, rate,   \
                  scale, update, step, count, rule);                                                                              \
    }                                                                                                                             \
    extern "C" __global__ void lamb_moments_##NAME(const T* x, const T* m, const T* v, T* new_m, T* new_v, const G* gradient,      \
                                                   const float* scale, const uint8* update, const int64* step, double* parts,     \
                                                   uint count, AdamRule rule) {                                                   \
        lamb_moments(x, m, v, new_m, new_v, gradient, scale, update, step, parts, count, rule);                                   \
    }                                                                                                                             \
    extern "C" __global__ void factor_each_##NAME(const T* old, T* now, const G* gradient, const float* scale,                    \
                                                  const uint8* update, const int64* step, uint count, FactorRule rule) {          \
        factor_each(old, now, gradient, scale, update, step, count, rule);                                                        \
    }                                                                                                                             \
    extern "C" __global__ void factor_norms_##NAME(const T* x, const T* moments, const T* columns, const T* means,                \
                                                   const G* gradient, const float* scale, const uint8* update, double* parts,     \
                                                   uint count, Matrices matrices, FactorRule rule) {                              \
        factor_norms(x, moments, columns, means, gradient, scale, update, parts, count, matrices, rule);                          \
    }                                                                                                                             \
    extern "C" __global__ void factor_apply_##NAME(const T* x, T* new_x, const T* moments, const T* columns, const T* means,      \
                                                   const G* gradient, const float* rate, const float* scale,                      \
                                                   const uint8* update, const int64* step, const double* parts, uint count,       \
                                                   uint blocks, Matrices matrices, FactorRule rule) {                             \
        factor_apply(x, new_x, moments, columns, means, gradient, rate, scale, update, step, parts, count, blocks, matrices,      \
                     rule);                                                                                                       \
    }                                                                                                                             \
    extern "C" __global__ void accumulate_##NAME(const T* sum, T* now, const G* value, const uint8* overwrite, Range range) {     \
        Added<T> added = {*overwrite != 0};                                                                                       \
        update_all(Tensors<T, 1>{{sum}, {now}}, value, range, true, added);                                                       \
    }                                                                                                                             \
    FACTOR_ROWS(1, NAME, T, G) FACTOR_ROWS(32, NAME, T, G) FACTOR_ROWS(256, NAME, T, G)                                           \
    FACTOR_COLUMNS(1, NAME, T, G) FACTOR_COLUMNS(8, NAME, T, G)
#define FACTOR_ROWS(TEAM, NAME, T, G)                                                                                             \
    extern "C" __global__ void factor_rows_##NAME##_##TEAM(const T* old, T* now, const G* gradient, const float* scale,           \
                                                           const uint8* update, const int64* step, Matrices matrices,             \
                                                           FactorRule rule) {                                                     \
        factor_rows<TEAM>(old, now, gradient, scale, update, step, matrices, rule);                                               \
    }
#define FACTOR_COLUMNS(TEAM, NAME, T, G)                                                                                          \
    extern "C" __global__ void factor_columns_##NAME##_##TEAM(const G* gradient, const uint8* update, double* parts,              \
                                                              Matrices matrices) {                                                \
        factor_columns<TEAM, T>(gradient, update, parts, matrices);                                                               \
    }
#define FACTOR_MEANS(TEAM, NAME, T)                                                                                               \
    extern "C" __global__ void factor_means_##NAME##_##TEAM(const T* rows, T* means, const uint8* update, Matrices matrices,      \
                                                            FactorRule rule) {                                                    \
        factor_means<TEAM>(rows, means, update, matrices, rule);                                                                  \
    }
#define OF_PARAMETER(NAME, T)                                                                                                     \
    extern "C" __global__ void keep_##NAME(const T* from, T* to, uint count) {                                                    \
        for (uint i = thread_index(); i < count; i += gridDim.x * blockDim.x) to[i] = from[i];                                    \
    }                                                                                                                             \
    extern "C" __global__ void lamb_apply_##NAME(const T* x, T* new_x, const T* m, const T* v, const float* rate,                 \
                                                 const uint8* update, const int64* step, const double* parts, uint count,         \
                                                 uint blocks, double most, AdamRule rule) {                                       \
        lamb_apply(x, new_x, m, v, rate, update, step, parts, count, blocks, most, rule);                                         \
    }                                                                                                                             \
    extern "C" __global__ void factor_join_##NAME(const double* parts, uint splits, const T* old, T* now, const float* scale,     \
                                                  const uint8* update, const int64* step, Matrices matrices,                      \
                                                  FactorRule rule) {                                                              \
        factor_join(parts, splits, old, now, scale, update, step, matrices, rule);                                                \
    }                                                                                                                             \
    extern "C" __global__ void standard_##NAME(const T* x, const T* gradient, const T* state1, const T* state2, T* new_x,         \
                                               T* new_state1, T* new_state2, const void* rate, const int64* count,                \
                                               uint rate_is_double, uint kind, uint elements, StandardRule rule) {                \
        standard(x, gradient, state1, state2, new_x, new_state1, new_state2, rate, count, rate_is_double, kind, elements, rule);  \
    }                                                                                                                             \
    FACTOR_MEANS(1, NAME, T) FACTOR_MEANS(32, NAME, T) FACTOR_MEANS(256, NAME, T)                                                 \
    OF_GRADIENT(NAME##_f32, T, float) OF_GRADIENT(NAME##_f64, T, double)                                                          \
    OF_GRADIENT(NAME##_f16, T, __half) OF_GRADIENT(NAME##_bf16, T, __nv_bfloat16)

OF_PARAMETER(f32, float)
OF_PARAMETER(f64, double)
