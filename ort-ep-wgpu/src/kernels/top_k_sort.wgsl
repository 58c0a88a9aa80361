// Sorts a part of a row in the workgroup's memory.
var<workgroup> keys: array<u32, SIZE>;
var<workgroup> places: array<u32, SIZE>;

fn group(index: u32, lane: u32) {
    let row = index / p.parts;
    let first = (index - row * p.parts) * SIZE;
    for (var i = lane; i < SIZE; i += LANES) {
        let place = first + i;
        keys[i] = 0xffffffffu;
        places[i] = 0xffffffffu;
        if (place < p.len) {
            keys[i] = key(row_at(row, place));
            places[i] = place;
        }
    }
    for (var run = 2u; run <= SIZE; run *= 2u) {
        for (var reach = run / 2u; reach > 0u; reach /= 2u) {
            workgroupBarrier();
            for (var pair = lane; pair < SIZE / 2u; pair += LANES) {
                let low = 2u * pair - (pair & (reach - 1u));
                exchange(low, low + reach, (low & run) == 0u);
            }
        }
    }
    workgroupBarrier();
    let end = min(p.capacity, p.len - first);
    for (var rank = lane; rank < end; rank += LANES) {
        keep(row, index, rank, keys[rank], places[rank]);
    }
}

fn exchange(low: u32, high: u32, ascending: bool) {
    let low_key = keys[low];
    let low_place = places[low];
    if (before(keys[high], places[high], low_key, low_place) == ascending) {
        keys[low] = keys[high];
        places[low] = places[high];
        keys[high] = low_key;
        places[high] = low_place;
    }
}
