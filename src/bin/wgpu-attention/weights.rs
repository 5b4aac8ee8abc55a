//! Attention weights of one head, for the picture: no kernel ever stores them.

use anyhow::Result;
use wgpu_attention::{AttentionDesc, Batch, HostInput, Lengths, Start, reference};

/// More than this many pairs take too long in f64 on the CPU; then rows are left out.
const MOST_PAIRS: u64 = 4 << 20;

/// A matrix of `rows × keys` weights, of every `step`-th query row.
pub struct Weights {
    pub values: Vec<f32>,
    pub rows: usize,
    pub keys: usize,
    pub step: u32,
}

/// `exp(score − LSE)` of sequence `b` and head `head`, with the LSE that was computed for the whole batch.
pub fn weights(
    desc: &AttentionDesc,
    batch: &Batch,
    input: &HostInput,
    lse: &[f32],
    b: usize,
    head: u32,
) -> Result<Weights> {
    let (q_len, kv_len) = (batch.q.len(b), batch.kv.len(b));
    let step = (u64::from(q_len) * u64::from(kv_len)).div_ceil(MOST_PAIRS).max(1) as u32;
    let (first, per_head) = batch.q.lse_place(b, desc.heads);
    // Over a single key, the log-sum-exp is the score.
    let desc = AttentionDesc { sinks: None, v_head_dim: Some(1), ..desc.clone() };
    let mut values = Vec::new();
    for row in (0..q_len).step_by(step as usize) {
        let at = first + u64::from(head) * per_head + u64::from(row);
        let lse = f64::from(lse[at as usize]);
        for key in 0..kv_len {
            let start = [(batch.start_of(b) - i64::from(key)) as i32];
            let one = only(batch, b, key, &start);
            let (_, score) = reference::attention_row::<f64>(&desc, &one, input, 0, head, row)?;
            // A row that sees no key has −∞ for both.
            values.push(if score == f64::NEG_INFINITY { 0.0 } else { (score - lse).exp() as f32 });
        }
    }
    Ok(Weights { values, rows: q_len.div_ceil(step) as usize, keys: kv_len as usize, step })
}

/// Sequence `b` with the one key `key`, which keeps its distance from every row.
fn only<'a>(batch: &Batch<'a>, b: usize, key: u32, start: &'a [i32; 1]) -> Batch<'a> {
    let mut one = *batch;
    let (sequence, key) = (b as u64, u64::from(key));
    one.q_layout.offset = batch.q.start(b, &batch.q_layout);
    one.k_layout.offset = batch.kv.start(b, &batch.k_layout) + key * batch.k_layout.seq;
    one.v_layout.offset = batch.kv.start(b, &batch.v_layout) + key * batch.v_layout.seq;
    for scores in [&mut one.bias_layout, &mut one.mask_layout].into_iter().flatten() {
        scores.offset += sequence * scores.batch + key * scores.key;
    }
    one.q = Lengths::Uniform { batch: 1, len: batch.q.len(b) };
    one.kv = Lengths::Uniform { batch: 1, len: 1 };
    one.start = Start::Explicit(start);
    one
}

#[cfg(test)]
mod tests {
    use super::*;
    use wgpu_attention::{HostMask, MaskKind, ScoreLayout, Window};

    #[test]
    fn weights_times_v_are_the_output() {
        let desc = AttentionDesc {
            heads: 2,
            head_dim: 4,
            v_head_dim: Some(3),
            causal: true,
            window: Window { left: Some(5), right: None },
            softcap: Some(3.0),
            alibi: Some(vec![0.1, 0.2]),
            sinks: Some(vec![0.5, -1.0]),
            bias: Some(wgpu_attention::DType::F32),
            mask: Some(MaskKind::Bool),
            lse: true,
            ..AttentionDesc::default()
        };
        let (q, kv) = (Lengths::Ragged { offsets: &[0, 3, 10] }, Lengths::Ragged { offsets: &[0, 4, 9] });
        let batch = Batch {
            bias_layout: ScoreLayout::broadcast(&[2, 2, 7, 5], [2, 2, 7, 5]),
            mask_layout: ScoreLayout::broadcast(&[2, 1, 1, 5], [2, 2, 7, 5]),
            ..Batch::new(&desc, q, kv)
        };
        let wave = |count: usize, step: f32| (0..count).map(|i| (i as f32 * step).sin()).collect::<Vec<f32>>();
        let (q, k, v, bias) = (wave(80, 0.7), wave(36, 1.3), wave(27, 2.1), wave(140, 0.9));
        let mask = [1, 1, 0, 1, 1, 1, 0, 1, 1, 1];
        let input = HostInput { q: &q, k: &k, v: &v, bias: Some(&bias), mask: HostMask::Bool(&mask) };
        let (out, lse) = reference::attention::<f32>(&desc, &batch, &input).unwrap();
        for (b, head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let found = weights(&desc, &batch, &input, &lse, b, head).unwrap();
            assert_eq!((found.rows, found.keys, found.step), ([3, 7][b], [4, 5][b], 1));
            for (row, values) in found.values.chunks(found.keys).enumerate() {
                for d in 0..3 {
                    let v_at = |key: usize| v[([0, 4][b] + key) * 3 + d];
                    let sum: f32 = values.iter().enumerate().map(|(key, weight)| weight * v_at(key)).sum();
                    let expected = out[([0, 3][b] + row) * 6 + head as usize * 3 + d];
                    assert!((sum - expected).abs() < 1e-5, "{b} {head} {row} {d}: {sum}, expected {expected}");
                }
            }
        }
    }
}
