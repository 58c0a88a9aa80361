// What the two programs of attention share: of all heads that share keys, and of the parts that their results
// are computed in.

// What is less than this is no score.
const LOWEST: f32 = -3.4028235e38;

fn place_of(step: vec3<u32>, batch: u32, head: u32, row: u32) -> u32 {
    return batch * step.x + head * step.y + row * step.z;
}

// e^(score - top), 0 where there is no score.
fn weight(score: f32, top: f32) -> f32 {
    if (score < LOWEST) { return 0.0; }
    return exp_(score - top);
}

// Where the result of a row is. The row is one of the heads that share the keys of a pair of a batch and a
// head of keys.
fn place_of_result(pair: u32, row: u32) -> u32 {
    let head = pair % p.key_heads * p.sharing + row / p.queries;
    return place_of(vec3<u32>(y_step(0u), y_step(1u), y_step(2u)), pair / p.key_heads, head, row % p.queries);
}

// Where the part of a row is: the results, the greatest score and the sum of the weights.
fn place_of_part(pair: u32, split: u32, row: u32) -> u32 {
    return ((pair * p.splits + split) * p.rows + row) * (p.value_size + 2u);
}

// A query all of whose scores are -inf has no weights: it gives 0, or NaN.
fn quotient(result: f32, sum: f32) -> f32 {
    return select(result / sum, p.without_weights, sum == 0.0);
}
