// New rows of heads on their way behind those of a past: with a bias, or turned by the angles of their positions; or just from one layout or
// type to another.

#include "common.cuh"

// How elements are stored; heads.rs has the same numbers.
enum Kind { FLOAT, HALF, BFLOAT, BOOL, INT, LONG };
// The position of a new row: its place among all rows, a number for each token, or its place behind the only number or among all tokens.
enum Position { BY_PLACE, BY_TOKEN, BEHIND_FIRST, BY_NUMBER };

// Where rows of heads are, in elements: the first one, and from one batch, head and row to the next.
struct Rows { int first, batch, head, row; };

struct Placing {
    int heads, size;
    // New rows of a head, rows that are written, and those that there are at all.
    int many, rows, capacity;
    Rows from, to;
    int from_kind, to_kind;
    int past_rows;
    // How many rows precede the new ones, or how many more there are than the lengths say, whose end the new ones are.
    int before, lengths_kind;
    // Whether new rows are placed at the front; whether no others are written.
    int at_front, keeps;
    int bias_first;
    // Pairs that are turned, rows of the angles, and how positions are found.
    int half, angles, position, interleaved, angles_kind;
    // Whether rows are whole vectors of four elements of one type that are moved as they are.
    int moves;
};

__device__ inline float read_as(const void* from, int kind, int64 at) {
    if (kind == FLOAT) return ((const float*)from)[at];
    return kind == HALF ? as_float(((const __half*)from)[at]) : as_float(((const __nv_bfloat16*)from)[at]);
}

__device__ inline void write_as(void* to, int kind, int64 at, float value) {
    if (kind == FLOAT) ((float*)to)[at] = value;
    else if (kind == HALF) ((__half*)to)[at] = from_float<__half>(value);
    else ((__nv_bfloat16*)to)[at] = from_float<__nv_bfloat16>(value);
}

__device__ inline int64 place_of(const Rows& rows, int batch, int head, int row) {
    return rows.first + (int64)batch * rows.batch + (int64)head * rows.head + (int64)row * rows.row;
}

template <typename V> __device__ inline bool is_aligned(const void* at) { return (uint64)at % sizeof(V) == 0; }

// Copies a row in vectors of four elements, or writes zeros where there is no source.
template <typename V> __device__ inline void move(const void* from, int64 from_at, void* to, int64 to_at, int size, int lane) {
    const V* source = (const V*)from + from_at / 4;
    V* target = (V*)to + to_at / 4;
    for (int at = lane; at < size / 4; at += 32) target[at] = from ? source[at] : V();
}

// The row of the angles of a new row.
__device__ inline int angle_of(const Placing& p, const int64* positions, int batch, int row, int before) {
    int64 position = before + row;
    int64 token = (int64)batch * p.many + row;
    if (p.position == BY_TOKEN) position = positions[token];
    if (p.position == BEHIND_FIRST) position = positions[0] + row;
    if (p.position == BY_NUMBER) position = token;
    return (int)max(min(position, (int64)p.angles - 1), (int64)0);
}

// Writes a row by a warp.
__device__ __forceinline__ void place(const void* from, const void* past, const void* bias, const void* lengths, const void* cos,
                                      const void* sin, const int64* positions, void* to, const Placing& p, int line) {
    int lane = threadIdx.x % 32;
    int row = line % p.rows, head = line / p.rows % p.heads, batch = line / p.rows / p.heads;
    int before = p.before;
    if (lengths) {
        int64 given = p.lengths_kind == LONG ? ((const int64*)lengths)[batch] : ((const int*)lengths)[batch];
        before = (int)max(min(given + p.before - p.many, (int64)1 << 30), (int64)0);
    }
    int front = p.at_front ? 0 : before, place = p.keeps ? front + row : row, fresh = place - front;
    if (place >= p.capacity) return;
    bool is_old = fresh < 0, is_new = !is_old && fresh < p.many;
    int64 to_at = place_of(p.to, batch, head, place);
    // Rows behind the last are zeros.
    const void* source = is_old ? past : is_new ? from : nullptr;
    int64 from_at = is_old ? (((int64)batch * p.heads + head) * p.past_rows + place) * p.size : place_of(p.from, batch, head, fresh);
    if (is_old && place >= p.past_rows) source = nullptr;
    int kind = is_old ? p.to_kind : p.from_kind;
    bool changes = is_new && (bias || p.half > 0);
    bool whole = p.to_kind == FLOAT ? is_aligned<uint4>(source) && is_aligned<uint4>(to) : is_aligned<uint2>(source) && is_aligned<uint2>(to);
    if (p.moves && whole && !changes) {
        if (p.to_kind == FLOAT) move<uint4>(source, from_at, to, to_at, p.size, lane);
        else move<uint2>(source, from_at, to, to_at, p.size, lane);
        return;
    }
    auto plain = [&](int c) {
        float value = source ? read_as(source, kind, from_at + c) : 0.0f;
        return changes && bias ? value + read_as(bias, p.from_kind, (int64)p.bias_first + (int64)head * p.size + c) : value;
    };
    int64 angles = changes && p.half > 0 ? (int64)angle_of(p, positions, batch, fresh, before) * p.half : 0;
    for (int c = lane; c < p.size; c += 32) {
        float value = plain(c);
        if (changes && c < 2 * p.half) {
            bool second = p.interleaved ? c % 2 == 1 : c >= p.half;
            int pair = p.interleaved ? c / 2 : second ? c - p.half : c;
            float other = plain(p.interleaved ? c ^ 1 : second ? c - p.half : c + p.half);
            float turned = other * read_as(sin, p.angles_kind, angles + pair);
            value = value * read_as(cos, p.angles_kind, angles + pair) + (second ? turned : -turned);
        }
        write_as(to, p.to_kind, to_at + c, value);
    }
}

__device__ inline int line_of_warp() { return blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; }

extern "C" __global__ void place_rows(const void* from, const void* past, const void* bias, const void* lengths, const void* cos,
                                      const void* sin, const int64* positions, void* to, Placing p, int lines) {
    int line = line_of_warp();
    if (line < lines) place(from, past, bias, lengths, cos, sin, positions, to, p, line);
}

// Keys and values, as they are.
extern "C" __global__ void place_both(const void* k, const void* k_past, void* k_to, const void* v, const void* v_past, void* v_to,
                                      Placing keys, Placing values, int lines) {
    int line = line_of_warp();
    if (line >= lines) return;
    if (blockIdx.y == 0) place(k, k_past, nullptr, nullptr, nullptr, nullptr, nullptr, k_to, keys, line);
    else place(v, v_past, nullptr, nullptr, nullptr, nullptr, nullptr, v_to, values, line);
}
