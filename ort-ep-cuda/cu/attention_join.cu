// Attention whose keys are cut in parts.
#include "attention.cuh"

// One result of the parts of each row.
extern "C" __global__ void attend_join(const float* parts, void* y, Attend p, int count) {
    int i = thread_index();
    if (i >= count) return;
    int c = i % p.value_size, row = i / p.value_size % p.rows, pair = i / p.value_size / p.rows;
    float top = -infinity(), result = 0.0f, sum = 0.0f;
    for (int split = 0; split < p.splits; split++) top = fmaxf(top, parts[place_of_part(p, pair, split, row) + p.value_size]);
    for (int split = 0; split < p.splits; split++) {
        const float* part = parts + place_of_part(p, pair, split, row);
        float share = expf(part[p.value_size] - base_of(top));
        result += share * part[c];
        sum += share * part[p.value_size + 1];
    }
    int head = pair % p.key_heads * p.sharing + row / p.queries;
    write_as(y, p.y_kind, place_of(p.y, pair / p.key_heads, head, row % p.queries) + c, quotient(result, sum));
}
