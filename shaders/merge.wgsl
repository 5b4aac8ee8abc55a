// Merges attention states over disjoint key sets: O = Σ wᵢ·Oᵢ / Σ wᵢ·lᵢ with wᵢ = exp(mᵢ − max m), LSE = max m + ln Σ wᵢ·lᵢ.
// Empty states are left out, whatever their bytes; the sink, if any, is added here, once. States are taken in ascending order.
//
// One workgroup merges one row of one head; a lane owns 4 neighbouring dims of every 4·WORKGROUP.
// The part says which row that is and where its states lie: partials of split items, or a caller's (O, LSE).

import package::parts::params::params;
import package::parts::exp::exp_below;
import package::parts::finish::finish;
import package::parts::lse_none::put_lse;
import package::parts::states_partial::locate;
import package::parts::states_partial::state;
import package::parts::states_partial::state_out;
@binding(9) import package::parts::store_f32 as out;

const WORKGROUP: u32 = 64u;
const FLT_MAX: f32 = 3.4028234663852886e38;

// Where one row's states are (`first` and `pitch` as the part takes them) and where its result goes.
struct Place {
    exists: bool,
    states: u32,
    first: u32,
    pitch: u32,
    head: u32,
    out: u32,
    lse: u32,
}

// By bits, because l may be NaN, for which not every adapter says that it differs from 0.
fn holds(state: vec2<f32>) -> bool {
    return bitcast<u32>(state.y) != 0u;
}

fn shrink(x: f32) -> f32 {
    return exp_below(vec4<f32>(x)).x;
}

@compute @workgroup_size(WORKGROUP)
fn main(@builtin(workgroup_id) workgroup: vec3<u32>, @builtin(local_invocation_index) lane: u32) {
    let place = locate(workgroup);
    if !place.exists {
        return;
    }
    var m = -FLT_MAX;
    for (var i = 0u; i < place.states; i += 1u) {
        let s = state(place, i); // m, l
        if holds(s) {
            m = max(m, s.x);
        }
    }
    var l = 0.0;
    for (var i = 0u; i < place.states; i += 1u) {
        let s = state(place, i);
        if holds(s) {
            l += s.y * shrink(s.x - m);
        }
    }
    let end = finish(m, l, place.head);
    for (var d = 4u * lane; d < params.v_dim; d += 4u * WORKGROUP) {
        let left = i32(params.v_dim) - i32(d);
        var o = vec4<f32>();
        for (var i = 0u; i < place.states; i += 1u) {
            let s = state(place, i);
            if holds(s) {
                o += shrink(s.x - m) * state_out(place, i, d, left);
            }
        }
        out::store4(place.out + d, o * end.factor, left);
    }
    if lane == 0u {
        put_lse(place.lse, end.lse);
    }
}
