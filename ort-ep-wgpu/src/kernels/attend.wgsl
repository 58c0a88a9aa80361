// Attention of a block of queries of the heads that share their keys, over tiles of keys. The scores of a
// tile become weights relative to the greatest score so far, by which what was summed before is scaled down
// (Dao et al., "FlashAttention", arXiv 2205.14135).
//
// A row is a query of one of the heads: QUADS x 4 rows of a block. For scores, a lane has one of ACROSS keys
// and four rows; for results, one of COLUMNS columns and MINE x 4 rows. CHUNK x 4 elements of queries and
// keys are multiplied at a time.
//
// A line with $t stands for TURNS lines, with $m for MINE and with $w for WIDE.

const ROWS: u32 = QUADS * 4u;
const KEYS: u32 = ACROSS * TURNS;
// Rows of tiles are one longer, so that the lanes that read a column are apart in memory.
const PITCH: u32 = CHUNK + 1u;
// Those that look for a maximum together.
const FEW: u32 = min(ACROSS, 16u);

var<workgroup> q_tile: array<vec4<f32>, ROWS * PITCH>;
var<workgroup> k_tile: array<vec4<f32>, KEYS * PITCH>;
var<workgroup> weights: array<vec4<f32>, KEYS * QUADS>;
var<workgroup> extremes: array<vec4<f32>, ACROSS * QUADS>;
var<workgroup> decays: array<vec4<f32>, QUADS>;
var<workgroup> length_cell: i32;

// Of the lane's own four rows: what they are, the keys that they see, the greatest score so far, and the sum
// of weights.
var<private> head: vec4<u32>;
var<private> query: vec4<u32>;
var<private> begin: vec4<i32>;
var<private> end: vec4<i32>;
var<private> top: vec4<f32>;
var<private> sum: vec4<f32>;
var<private> score_$t: vec4<f32>;
// Of the lane's own columns.
var<private> result_$m_$w: vec4<f32>;

fn q_steps() -> vec3<u32> { return vec3<u32>(q_step(0u), q_step(1u), q_step(2u)); }
fn k_steps() -> vec3<u32> { return vec3<u32>(k_step(0u), k_step(1u), k_step(2u)); }
fn v_steps() -> vec3<u32> { return vec3<u32>(v_step(0u), v_step(1u), v_step(2u)); }

// The keys that a query may see: from the first to before the last.
fn begin_of(query: i32, offset: i32) -> i32 {
    return select(0, max(query + offset - p.left, 0), p.left >= 0);
}

fn end_of(query: i32, offset: i32, length: i32) -> i32 {
    var end = min(i32(p.keys), length);
    let place = query + offset;
    if (p.causal == 1u || (p.causal == 2u && query + 1 != i32(p.queries))) { end = min(end, place + 1); }
    if (p.right >= 0) { end = min(end, place + p.right + 1); }
    return max(end, 0);
}

fn weight4(scores: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(
        weight(scores.x, top.x), weight(scores.y, top.y), weight(scores.z, top.z), weight(scores.w, top.w));
}

// Four elements from column `c` on; `at` is where the first is, `of_all` its place among the columns of all
// heads.
fn four_of_q(at: u32, c: u32, of_all: u32) -> vec4<f32> {
    var four = vec4<f32>(q_at(at, of_all), 0.0, 0.0, 0.0);
    if (c + 1u < p.size) { four.y = q_at(at + 1u, of_all + 1u); }
    if (c + 2u < p.size) { four.z = q_at(at + 2u, of_all + 2u); }
    if (c + 3u < p.size) { four.w = q_at(at + 3u, of_all + 3u); }
    return four;
}

fn four_of_k(at: u32, c: u32) -> vec4<f32> {
    if (c + 3u < p.size) { return vec4<f32>(k(at), k(at + 1u), k(at + 2u), k(at + 3u)); }
    var four = vec4<f32>(k(at), 0.0, 0.0, 0.0);
    if (c + 1u < p.size) { four.y = k(at + 1u); }
    if (c + 2u < p.size) { four.z = k(at + 2u); }
    return four;
}

fn load_queries(lane: u32, batch: u32, key_head: u32, first: u32, d: u32) {
    for (var e = lane; e < ROWS * CHUNK; e += LANES) {
        let row = first + e / CHUNK;
        let c = d + (e % CHUNK) * 4u;
        var four = vec4<f32>();
        if (row < p.rows && c < p.size) {
            let head = key_head * p.sharing + row / p.queries;
            let at = p.q_first + place_of(q_steps(), batch, head, row % p.queries) + c;
            four = four_of_q(at, c, head * p.size + c);
        }
        q_tile[(e / CHUNK) * PITCH + e % CHUNK] = four;
    }
}

fn load_keys(lane: u32, batch: u32, key_head: u32, start: u32, d: u32) {
    for (var e = lane; e < KEYS * CHUNK; e += LANES) {
        let key = start + e / CHUNK;
        let c = d + (e % CHUNK) * 4u;
        var four = vec4<f32>();
        if (key < p.keys && c < p.size) {
            four = four_of_k(p.k_first + place_of(k_steps(), batch, key_head, key) + c, c);
        }
        k_tile[(e / CHUNK) * PITCH + e % CHUNK] = four;
    }
}

// Adds the products of what the tiles hold to the scores.
fn multiply(x: u32, quad: u32) {
    for (var c = 0u; c < CHUNK; c++) {
        let at = quad * 4u * PITCH + c;
        let q0 = q_tile[at];
        let q1 = q_tile[at + PITCH];
        let q2 = q_tile[at + 2u * PITCH];
        let q3 = q_tile[at + 3u * PITCH];
        let k$t = k_tile[(x + $tu * ACROSS) * PITCH + c];
        score_$t += vec4<f32>(dot(q0, k$t), dot(q1, k$t), dot(q2, k$t), dot(q3, k$t));
    }
}

// The scores of a key from the products; what is no score is infinitely low.
fn scored(products: vec4<f32>, batch: u32, key: u32, keys_end: u32) -> vec4<f32> {
    var scores = vec4<f32>(-infinity());
    if (key >= keys_end) { return scores; }
    let seen = vec4<i32>(i32(key)) >= begin & vec4<i32>(i32(key)) < end;
    scores.x = row_score(products.x, seen.x, batch, head.x, query.x, key);
    scores.y = row_score(products.y, seen.y, batch, head.y, query.y, key);
    scores.z = row_score(products.z, seen.z, batch, head.z, query.z, key);
    scores.w = row_score(products.w, seen.w, batch, head.w, query.w, key);
    return scores;
}

fn row_score(product: f32, seen: bool, batch: u32, head: u32, query: u32, key: u32) -> f32 {
    if (head >= p.heads) { return -infinity(); }
    return score_of(product * p.scale, seen, batch, head, query, key);
}

// The greatest scores of four rows, where each lane across has its own.
fn tops(own: vec4<f32>, x: u32, quad: u32) -> vec4<f32> {
    extremes[x * QUADS + quad] = own;
    workgroupBarrier();
    if (ACROSS > FEW) {
        if (x < FEW) {
            var most = own;
            for (var other = x + FEW; other < ACROSS; other += FEW) {
                most = max(most, extremes[other * QUADS + quad]);
            }
            extremes[x * QUADS + quad] = most;
        }
        workgroupBarrier();
    }
    var most = extremes[quad];
    for (var other = 1u; other < FEW; other++) { most = max(most, extremes[other * QUADS + quad]); }
    return most;
}

// Turns scores into weights relative to the new greatest ones, and tells by how much the old ones decay.
fn weigh(x: u32, quad: u32) {
    var own = score_0;
    own = max(own, score_$t);
    let before = top;
    top = max(top, tops(own, x, quad));
    let decay = weight4(before);
    sum *= decay;
    let weight_$t = weight4(score_$t);
    sum += weight_$t;
    weights[(x + $tu * ACROSS) * QUADS + quad] = weight_$t;
    if (x == 0u) { decays[quad] = decay; }
}

// An element of a row of values, 0 beyond the last.
fn value_at(at: u32, c: u32) -> f32 {
    if (c < p.value_size) { return v(at + c); }
    return 0.0;
}

// Adds the values of so many keys by their weights to the results.
fn gather(batch: u32, key_head: u32, start: u32, many: u32, lane: u32) {
    let column = lane % COLUMNS;
    let quad_$m = min(lane / COLUMNS * MINE + $mu, QUADS - 1u);
    let decay_$m = decays[quad_$m];
    result_$m_$w *= decay_$m;
    let step = v_step(2u);
    var at = p.v_first + place_of(v_steps(), batch, key_head, start);
    for (var key = 0u; key < many; key++) {
        let value_$w = value_at(at, column + $wu * COLUMNS);
        let weight_$m = weights[key * QUADS + quad_$m];
        result_$m_$w += weight_$m * value_$w;
        at += step;
    }
}

// Finds out about the lane's own rows, from `first` on.
fn begin_rows(key_head: u32, first: u32, offset: i32, length: i32, counts_sinks: bool, is_first: bool) {
    top = vec4<f32>(-infinity());
    sum = vec4<f32>();
    result_$m_$w = vec4<f32>();
    for (var i = 0u; i < 4u; i++) {
        let row = first + i;
        // Beyond the last row there is no head.
        head[i] = select(p.heads, key_head * p.sharing + row / p.queries, row < p.rows);
        query[i] = row % p.queries;
        begin[i] = begin_of(i32(query[i]), offset);
        end[i] = end_of(i32(query[i]), offset, length);
        if (counts_sinks && row < p.rows) {
            top[i] = sink_of(head[i]);
            sum[i] = select(0.0, 1.0, is_first);
        }
    }
}

// Sums the weights of each row over the lanes across, and writes what is of the whole row.
fn sum_up(x: u32, quad: u32, pair: u32, split: u32, first: u32) {
    workgroupBarrier();
    extremes[x * QUADS + quad] = sum;
    workgroupBarrier();
    if (x == 0u) {
        for (var other = 1u; other < ACROSS; other++) { sum += extremes[other * QUADS + quad]; }
        decays[quad] = sum;
        for (var i = 0u; i < 4u; i++) {
            let row = first + quad * 4u + i;
            if (row < p.rows) { put_line(pair, split, row, top[i], sum[i]); }
        }
    }
    workgroupBarrier();
}

fn write(pair: u32, split: u32, first: u32, quad: u32, c: u32, results: vec4<f32>) {
    if (quad >= QUADS || c >= p.value_size) { return; }
    let sums = decays[quad];
    for (var i = 0u; i < 4u; i++) {
        let row = first + quad * 4u + i;
        if (row < p.rows) { put(pair, split, row, c, results[i], sums[i]); }
    }
}

fn group(index: u32, lane: u32) {
    let split = index % p.splits;
    let first = index / p.splits % p.blocks * ROWS;
    let pair = index / p.splits / p.blocks;
    let batch = pair / p.key_heads;
    let key_head = pair % p.key_heads;
    if (lane == 0u) { length_cell = length_of(batch); }
    let length = workgroupUniformLoad(&length_cell);
    let offset = offset_of(length);
    // The keys that any row of the block sees, and of those the ones of this part.
    let last = min(first + ROWS, p.rows) - 1u;
    let mixed = first / p.queries != last / p.queries;
    let range_begin = begin_of(i32(select(first % p.queries, 0u, mixed)), offset);
    let range_end = end_of(i32(select(last % p.queries, p.queries - 1u, mixed)), offset, length);
    let all_begin = select(u32(range_begin), 0u, p.all == 1u);
    let all_end = max(select(u32(range_end), p.keys, p.all == 1u), all_begin);
    let share = (all_end - all_begin + p.splits - 1u) / p.splits;
    let keys_begin = min(all_begin + split * share, all_end);
    let keys_end = min(keys_begin + share, all_end);
    let x = lane % ACROSS;
    let quad = lane / ACROSS;
    begin_rows(key_head, first + quad * 4u, offset, length, p.sinks == 1u && split == 0u, x == 0u);
    for (var start = keys_begin; start < keys_end; start += KEYS) {
        score_$t = vec4<f32>();
        for (var d = 0u; d < p.size; d += CHUNK * 4u) {
            workgroupBarrier();
            load_queries(lane, batch, key_head, first, d);
            load_keys(lane, batch, key_head, start, d);
            workgroupBarrier();
            multiply(x, quad);
        }
        score_$t = scored(score_$t, batch, start + x + $tu * ACROSS, keys_end);
        weigh(x, quad);
        workgroupBarrier();
        gather(batch, key_head, start, min(KEYS, keys_end - start), lane);
    }
    sum_up(x, quad, pair, split, first);
    let mine = lane / COLUMNS * MINE;
    write(pair, split, first, mine + $mu, lane % COLUMNS + $wu * COLUMNS, result_$m_$w);
}
