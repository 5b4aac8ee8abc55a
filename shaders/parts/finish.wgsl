// The last step of a row: its unnormalised output is multiplied by `factor`; −∞ is written as bits.
// A sink is one more logit in the denominator, with no value. A row with no key (l = 0) gives 0 and −∞, or the sink.
import package::parts::params::params;
import package::parts::params::sink_of;
import package::parts::exp::exp_below;

const MINUS_INFINITY: u32 = 0xff800000u;
const EXPONENT: u32 = 0x7f800000u;
const NAN: u32 = 0x7fc00000u;

struct Finished {
    factor: f32,
    lse: u32,
}

// `l` is a sum of at most 2³⁰ numbers up to 1: where it is not finite, the row saw a NaN; where `m` is +∞, the row saw that,
// and exp(∞ − ∞) is NaN.
fn is_lost(m: f32, l: f32) -> bool {
    return (bitcast<u32>(l) & EXPONENT) == EXPONENT || bitcast<u32>(m) == EXPONENT;
}

fn finish(m: f32, l: f32, head: u32) -> Finished {
    let sink = sink_of(head);
    let has_sink = (params.flags & SINKS) != 0u && bitcast<u32>(sink) != MINUS_INFINITY;
    if is_lost(m, l) {
        return Finished(bitcast<f32>(NAN | bitcast<u32>(l)), NAN); // of `l`, since a constant NaN is an error
    }
    if l == 0.0 {
        return Finished(0.0, select(MINUS_INFINITY, bitcast<u32>(sink), has_sink));
    }
    if has_sink {
        let top = max(m, sink);
        let part = exp_below(vec4<f32>(m - top, sink - top, 0.0, 0.0));
        let total = l * part.x + part.y;
        return Finished(part.x / total, bitcast<u32>(top + log(total)));
    }
    return Finished(1.0 / l, bitcast<u32>(m + log(l)));
}
