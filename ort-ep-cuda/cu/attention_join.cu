// Attention whose keys are cut in parts.
#include "attention.cuh"

// One result of the parts of each row.
extern "C" __global__ void attend_join(const float* parts, void* y, Attend p, int count) {
    int i = thread_index();
    if (i >= count) return;
    int2 of_size = divide(i, p.value_size), of_rows = divide(of_size.x, p.rows), of_pairs = divide(of_rows.x, p.key_heads);
    int c = of_size.y, row = of_rows.y, pair = of_rows.x;
    const float* first = parts + place_of_part(p, pair, 0, row);
    int64 step = place_of_part(p, 0, 1, 0);
    float top = -infinity(), result = 0.0f, sum = 0.0f;
#pragma unroll 8
    for (int split = 0; split < p.splits; split++) top = fmaxf(top, first[split * step + p.value_size]);
#pragma unroll 8
    for (int split = 0; split < p.splits; split++) {
        const float* part = first + split * step;
        float share = expf(part[p.value_size] - base_of(top));
        result += share * part[c];
        sum += share * part[p.value_size + 1];
    }
    int2 line = Block::line(p, row);
    write_as(y, p.y_kind, place_of(p.y, of_pairs.x, of_pairs.y * p.sharing + line.x, line.y) + c, quotient(result, sum, p));
}
