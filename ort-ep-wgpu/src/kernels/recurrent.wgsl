// One step of all sequences and directions: a workgroup sums for UNITS units of up to SEQUENCES sequences, PARTS
// invocations for each unit. The kernel says cell(place, sums), which takes one unit of one sequence on.
const UNITS: u32 = LANES / PARTS;
var<workgroup> partial: array<sums_t, LANES * SEQUENCES>;

// A unit of a sequence.
struct Place {
    direction: u32,
    sequence: u32,
    unit: u32,
    // Among the states.
    state: u32,
    // Whether the sequence has not ended, and the time of this step.
    goes_on: bool,
    time: u32,
}

fn state_row(direction: u32, sequence: u32) -> u32 {
    if (BATCH_FIRST == 1u) { return sequence * p.directions + direction; }
    return direction * p.batch + sequence;
}

fn place_of(direction: u32, sequence: u32, unit: u32) -> Place {
    let end = u32(clamp(length(sequence), 0, i32(p.steps)));
    let goes_on = p.step < end;
    let time = select(p.step, end - 1u - p.step, goes_on && direction >= p.reverse);
    let state = state_row(direction, sequence) * p.hidden + unit;
    return Place(direction, sequence, unit, state, goes_on, time);
}

// What comes from the input for a gate.
fn input_of(place: Place, gate: u32) -> f32 {
    var row = place.time * p.batch + place.sequence;
    if (BATCH_FIRST == 1u) { row = place.sequence * p.steps + place.time; }
    return inputs(((row * p.directions + place.direction) * GATES + gate) * p.hidden + place.unit);
}

fn y_place(place: Place) -> u32 {
    var row = (place.time * p.directions + place.direction) * p.batch + place.sequence;
    if (BATCH_FIRST == 1u) {
        row = (place.sequence * p.steps + place.time) * p.directions + place.direction;
    }
    return row * p.hidden + place.unit;
}

fn group(index: u32, lane: u32) {
    let tiles = (p.hidden + UNITS - 1u) / UNITS;
    let batches = (p.batch + SEQUENCES - 1u) / SEQUENCES;
    let first_unit = index % tiles * UNITS;
    let first = index / tiles % batches * SEQUENCES;
    let direction = index / tiles / batches;
    let unit = min(first_unit + lane / PARTS, p.hidden - 1u);
    let row = ((direction * GATES + FIRST_GATE) * p.hidden + unit) * p.hidden;
    sum_parts(direction, first, row, lane);
    workgroupBarrier();
    let own = first_unit + lane % UNITS;
    let sequence = first + lane / UNITS;
    if (lane < UNITS * SEQUENCES && own < p.hidden && sequence < p.batch) {
        let at = lane / UNITS * LANES + lane % UNITS * PARTS;
        var sums = partial[at];
        for (var part = 1u; part < PARTS; part++) { sums += partial[at + part]; }
        cell(place_of(direction, sequence, own), sums);
    }
}
