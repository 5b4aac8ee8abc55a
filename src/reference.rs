//! The oracle: every operation as a plain loop over its definition, in f64 or any other float. Slow and obvious.

use num_traits::Float;

use crate::error::{Error, Result};
use crate::host::{HostInput, HostMask};
use crate::ops::attention::{AttentionDesc, Batch, Lengths, MaskKind};
use crate::ops::merge::{MergeDesc, MergeLayout};
use crate::view::{Layout, ScoreLayout};

/// One query row: its output and LSE.
type Row<F> = (Vec<F>, F);

/// A key that a row sees, and its score.
type Seen<F> = (u64, F);

fn element(values: &[f32], at: u64, what: &str) -> Result<f32> {
    let found = usize::try_from(at).ok().and_then(|at| values.get(at));
    found.copied().ok_or_else(|| Error::shape(what, format!("more than {at} elements"), values.len()))
}

fn place(lengths: &Lengths, layout: &Layout, b: usize, token: u32, head: u32) -> u64 {
    lengths.start(b, layout) + u64::from(token) * layout.seq + u64::from(head) * layout.head
}

fn score_place(layout: &ScoreLayout, head: u32, row: u32) -> u64 {
    layout.offset + u64::from(head) * layout.head + u64::from(row) * layout.row
}

fn masked_in(
    desc: &AttentionDesc,
    batch: &Batch,
    mask: HostMask,
    b: usize,
    head: u32,
    row: u32,
    key: u32,
) -> Result<bool> {
    let layout = batch.mask_of(desc, b);
    let start = score_place(&layout, head, row);
    let key = u64::from(key) * layout.key;
    let missing = |len: usize| Error::shape("mask", "an element for every score", format!("{len} elements"));
    match (desc.mask, mask) {
        (None, HostMask::None) => Ok(true),
        (Some(MaskKind::Bool), HostMask::Bool(bytes)) => {
            Ok(*bytes.get((start + key) as usize).ok_or_else(|| missing(bytes.len()))? != 0)
        }
        (Some(MaskKind::Bits), HostMask::Bits(words)) => {
            let word = words.get((start + key / 32) as usize).ok_or_else(|| missing(words.len()))?;
            Ok((word >> (key % 32)) & 1 == 1)
        }
        _ => Err(Error::shape("mask", format!("{:?}, as the descriptor says", desc.mask), "another kind")),
    }
}

/// Query row `row` of sequence `b` and head `head`, computed in `F` from the first step to the last.
pub fn attention_row<F: Float>(
    desc: &AttentionDesc,
    batch: &Batch,
    input: &HostInput,
    b: usize,
    head: u32,
    row: u32,
) -> Result<Row<F>> {
    let to = |x: f32| F::from(x).expect("every float type holds an f32");
    let kv_head = head / desc.group();
    let position = batch.start_of(b) + i64::from(row);
    let window = desc.effective_window();
    let lowest = to(f32::MIN);
    let mut seen: Vec<Seen<F>> = Vec::new();
    for key in 0..batch.kv.len(b) {
        let j = i64::from(key);
        let too_early = window.left.is_some_and(|left| j < position - i64::from(left));
        let too_late = window.right.is_some_and(|right| j > position + i64::from(right));
        if too_early || too_late || !masked_in(desc, batch, input.mask, b, head, row, key)? {
            continue;
        }
        let q = place(&batch.q, &batch.q_layout, b, row, head);
        let key_place = |layout: &Layout| batch.key_at(layout, b, key) + u64::from(kv_head) * layout.head;
        let k = key_place(&batch.k_layout);
        let mut dot = F::zero();
        for d in 0..u64::from(desc.head_dim) {
            dot = dot + to(element(input.q, q + d, "q")?) * to(element(input.k, k + d, "k")?);
        }
        let mut score = to(desc.scale()) * dot;
        if let Some(cap) = desc.softcap {
            score = to(cap) * (score / to(cap)).tanh();
        }
        if desc.bias.is_some() {
            let bias = input.bias.ok_or_else(|| Error::shape("bias", "values, as the descriptor says", "none"))?;
            let layout = batch.bias_of(desc, b);
            let at = score_place(&layout, head, row) + u64::from(key) * layout.key;
            let bias = element(bias, at, "bias")?;
            if bias == f32::NEG_INFINITY {
                continue;
            }
            score = score + to(bias);
        }
        if let Some(slopes) = &desc.alibi {
            score = score - to(slopes[head as usize]) * to((position - j).abs() as f32);
        }
        seen.push((key_place(&batch.v_layout), if score < lowest { lowest } else { score }));
    }
    let sink = desc.sinks.as_ref().map(|sinks| sinks[head as usize]).filter(|sink| *sink != f32::NEG_INFINITY).map(to);
    let v_dim = u64::from(desc.v_dim());
    if seen.is_empty() {
        return Ok((vec![F::zero(); v_dim as usize], sink.unwrap_or_else(F::neg_infinity)));
    }
    let top =
        seen.iter().map(|(_, score)| *score).chain(sink).fold(F::neg_infinity(), |a, b| if b > a { b } else { a });
    let mut sum = sink.map_or(F::zero(), |sink| (sink - top).exp());
    let mut out = vec![F::zero(); v_dim as usize];
    for (value, score) in &seen {
        let weight = (*score - top).exp();
        sum = sum + weight;
        for d in 0..v_dim {
            out[d as usize] = out[d as usize] + weight * to(element(input.v, value + d, "v")?);
        }
    }
    Ok((out.into_iter().map(|x| x / sum).collect(), top + sum.ln()))
}

/// The whole batch: O as the batch lays it out (zeros where nothing is written) and the LSE.
pub fn attention<F: Float>(desc: &AttentionDesc, batch: &Batch, input: &HostInput) -> Result<(Vec<F>, Vec<F>)> {
    desc.validate()?;
    batch.validate()?;
    let mut out = vec![F::zero(); batch.out_len(desc) as usize];
    let mut lse = vec![F::zero(); batch.q.lse_len(desc.heads) as usize];
    for b in 0..batch.q.batch() {
        for head in 0..desc.heads {
            for row in 0..batch.q.len(b) {
                let (values, sum) = attention_row::<F>(desc, batch, input, b, head, row)?;
                let at = place(&batch.q, &batch.out_layout, b, row, head) as usize;
                out[at..at + values.len()].copy_from_slice(&values);
                let (first, per_head) = batch.q.lse_place(b, desc.heads);
                lse[(first + u64::from(head) * per_head + u64::from(row)) as usize] = sum;
            }
        }
    }
    Ok((out, lse))
}

/// Merges states `o` and `lse` as [`crate::Merge`] does.
pub fn merge<F: Float>(desc: &MergeDesc, layout: &MergeLayout, o: &[f32], lse: &[f32]) -> Result<(Vec<F>, Vec<F>)> {
    let to = |x: f32| F::from(x).expect("every float type holds an f32");
    let mut out = Vec::new();
    let mut out_lse = vec![F::zero(); (desc.heads * layout.rows) as usize];
    for head in 0..desc.heads {
        for row in 0..layout.rows {
            let mut states = Vec::new();
            for state in 0..layout.states {
                let at = (u64::from(state) * u64::from(desc.heads) + u64::from(head)) * u64::from(layout.rows)
                    + u64::from(row);
                let weight = element(lse, at, "lse")?;
                if !weight.is_infinite() {
                    let at = layout.state_layout.offset
                        + u64::from(state) * layout.state_layout.batch
                        + u64::from(row) * layout.state_layout.seq
                        + u64::from(head) * layout.state_layout.head;
                    states.push((to(weight), at));
                }
            }
            let sink =
                desc.sinks.as_ref().map(|sinks| sinks[head as usize]).filter(|s| *s != f32::NEG_INFINITY).map(to);
            let top = states.iter().map(|s| s.0).chain(sink).fold(F::neg_infinity(), |a, b| if b > a { b } else { a });
            let mut sum = sink.map_or(F::zero(), |sink| (sink - top).exp());
            let mut values = vec![F::zero(); desc.v_head_dim as usize];
            for (weight, at) in &states {
                let weight = (*weight - top).exp();
                sum = sum + weight;
                for (d, value) in values.iter_mut().enumerate() {
                    *value = *value + weight * to(element(o, at + d as u64, "states")?);
                }
            }
            let nothing = states.is_empty();
            let at = (layout.out_layout.offset
                + u64::from(row) * layout.out_layout.seq
                + u64::from(head) * layout.out_layout.head) as usize;
            if out.len() < at + values.len() {
                out.resize(at + values.len(), F::zero());
            }
            for (d, value) in values.into_iter().enumerate() {
                out[at + d] = if nothing { F::zero() } else { value / sum };
            }
            out_lse[(head * layout.rows + row) as usize] =
                if nothing { sink.unwrap_or_else(F::neg_infinity) } else { top + sum.ln() };
        }
    }
    Ok((out, out_lse))
}
