// Adafactor.
#pragma once

#include "optimizer.cuh"

// Means of the squared gradients over rows and over columns, or of each element where the parameter is no matrix, then the update,
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
#define FACTOR_ENTRIES(NAME, T, G)                                                                                                \
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
    FACTOR_ROWS(1, NAME, T, G) FACTOR_ROWS(32, NAME, T, G) FACTOR_ROWS(256, NAME, T, G) FACTOR_COLUMNS(1, NAME, T, G) FACTOR_COLUMNS(8, NAME, T, G)
#define ADAFACTOR(NAME, T)                                                                                                        \
    extern "C" __global__ void factor_join_##NAME(const double* parts, uint splits, const T* old, T* now, const float* scale,     \
                                                  const uint8* update, const int64* step, Matrices matrices,                      \
                                                  FactorRule rule) {                                                              \
        factor_join(parts, splits, old, now, scale, update, step, matrices, rule);                                                \
    }                                                                                                                             \
    FACTOR_MEANS(1, NAME, T) FACTOR_MEANS(32, NAME, T) FACTOR_MEANS(256, NAME, T) OF_GRADIENTS(FACTOR_ENTRIES, NAME, T)
