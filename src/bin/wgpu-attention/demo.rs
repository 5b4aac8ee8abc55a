//! `demo`: attention of a real language model on a real text, computed, checked, timed and drawn.

use anyhow::{Context, Result, bail};
use clap::Args;
use safetensors::SafeTensors;
use wgpu_attention::{AttentionDesc, Batch, DType, HostInput, HostMask, Lengths};

use crate::compare::{Comparison, compare, largest, tolerance};
use crate::engine::{Answer, Engine};
use crate::tensor::FileType;
use crate::weights::{Weights, weights};
use crate::{Global, terminal};

/// Compute the attention of three layers of a language model, check it, time it and draw one head
///
/// Q, K and V were recorded while SmolLM2-135M read the beginning of a book; the expected results come from the same
/// numbers in f64. They are part of this program.
#[derive(Args)]
pub struct DemoArgs {}

const RECORDING: &[u8] =
    include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/smollm2-135m-attention.safetensors"));
const LAYERS: [u32; 3] = [0, 14, 29];
/// The layer and head to draw.
const DRAWN: (u32, u32) = (14, 0);
/// The picture is square; wider, it would be too high for a screen.
const MAP_WIDTH: usize = 72;

/// One layer of the recording.
struct Layer {
    tokens: u32,
    desc: AttentionDesc,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

pub fn run(_: &DemoArgs, global: &Global) -> Result<()> {
    let recording = SafeTensors::deserialize(RECORDING).context("the recording in this program is damaged")?;
    let layers: Vec<Layer> = LAYERS.iter().map(|layer| Layer::read(&recording, *layer)).collect::<Result<_>>()?;
    let engine = Engine::open(global)?;

    let AttentionDesc { heads, kv_heads, head_dim, .. } = layers[0].desc;
    let mut text = format!(
        "SmolLM2-135M, a language model, reads the opening of Alice in Wonderland:\n\
         {} tokens, {heads} query heads on {kv_heads} key/value heads of dim {head_dim}, causal, f16.\n\n\
         adapter  {}\n\n",
        layers[0].tokens,
        engine.short_label()
    );
    let header = ["layer", "kernel", "error of O", "of LSE", "time", "verdict"];
    let mut table = terminal::table(80, header.map(String::from).to_vec());
    let mut failures = Vec::new();
    let mut picture = String::new();
    let mut method = String::new();
    for (number, layer) in LAYERS.into_iter().zip(&layers) {
        let answer = engine.attend(&layer.desc, &layer.batch(), &layer.input())?;
        let (out, lse) = layer.compare(&answer);
        let passed = out.passed() && lse.passed();
        if !passed {
            failures.push(format!("layer {number}: O: {out}; LSE: {lse}"));
        }
        let (time, how) = match &answer.time {
            Some(time) => (terminal::seconds(time.seconds), time.method.as_str()),
            None => ("–".into(), "not measured"),
        };
        method = how.into();
        table.add_row([
            number.to_string(),
            layer.kernel(&answer),
            format!("{:.1e}", out.error),
            format!("{:.1e}", lse.error),
            time,
            if passed { "ok" } else { "WRONG" }.into(),
        ]);
        if number == DRAWN.0 {
            picture = layer.picture(&answer)?;
        }
    }
    let lines: String = table.lines().map(|line| line.trim_end().to_owned() + "\n").collect();
    text += &lines;
    text += &format!("\nErrors: largest difference from f64. Time: {method}.\n");
    text += &picture;
    terminal::print(text)?;
    engine.keep();
    if !failures.is_empty() {
        bail!("the results are wrong: {}", failures.join("; "));
    }
    Ok(())
}

impl Layer {
    fn read(recording: &SafeTensors, layer: u32) -> Result<Layer> {
        let tensor = |name: &str, dtype: DType| -> Result<(Vec<f32>, Vec<u32>)> {
            let name = format!("layer{layer}.{name}");
            let view = recording.tensor(&name).with_context(|| format!("the recording has no {name}"))?;
            let values = dtype.decode(view.data(), view.shape().iter().product());
            Ok((values, view.shape().iter().map(|length| *length as u32).collect()))
        };
        let (q, q_shape) = tensor("q", DType::F16)?;
        let (k, k_shape) = tensor("k", DType::F16)?;
        let (v, _) = tensor("v", DType::F16)?;
        let (out, _) = tensor("out", DType::F32)?;
        let (lse, _) = tensor("lse", DType::F32)?;
        let [_, tokens, heads, head_dim] = q_shape[..] else { bail!("the recording has an odd shape: {q_shape:?}") };
        let desc = AttentionDesc {
            heads,
            kv_heads: k_shape[2],
            head_dim,
            q_dtype: DType::F16,
            kv_dtype: DType::F16,
            causal: true,
            lse: true,
            ..AttentionDesc::default()
        };
        Ok(Layer { tokens, desc, q, k, v, out, lse })
    }

    fn batch(&self) -> Batch<'static> {
        let all = Lengths::Uniform { batch: 1, len: self.tokens };
        Batch::new(&self.desc, all, all)
    }

    fn input(&self) -> HostInput<'_> {
        HostInput { q: &self.q, k: &self.k, v: &self.v, bias: None, mask: HostMask::None }
    }

    fn compare(&self, answer: &Answer) -> (Comparison, Comparison) {
        let near = |got: &[f32], want: &[f32], scale: f64| compare(got, want, tolerance(FileType::F32, scale));
        (near(&answer.out, &self.out, largest(&self.v)), near(&answer.lse, &self.lse, largest(&self.lse)))
    }

    /// The kernels of a layer, without what their names have in common.
    fn kernel(&self, answer: &Answer) -> String {
        match answer.variants.as_slice() {
            [] => "f64 oracle".into(),
            names => names.iter().map(|name| name.trim_start_matches("attention.")).collect::<Vec<_>>().join("\n"),
        }
    }

    fn picture(&self, answer: &Answer) -> Result<String> {
        let (layer, head) = DRAWN;
        let weights = weights(&self.desc, &self.batch(), &self.input(), &answer.lse, 0, head)?;
        let (map, [first, near]) = (terminal::map(&weights, terminal::width().min(MAP_WIDTH)), shares(&weights));
        Ok(format!(
            "\nLayer {layer}, head {head}: what a token (line) takes from each token up to it (column).\n{map}\n\
             Bright first column: {first:.0} % of the attention rests on the first token, where\n\
             models look when nothing else matters. Bright edge: {near:.0} % goes to a token itself\n\
             and the {NEAR} before it. Empty corner: the future, which causal attention can't see.\n"
        ))
    }
}

/// Tokens before a token that count as near.
const NEAR: usize = 7;

/// Percent of the attention of rows with more than near tokens that goes to the first token, and to near ones.
fn shares(weights: &Weights) -> [f32; 2] {
    let rows = weights.values.chunks(weights.keys).enumerate().skip(NEAR + 1);
    let (mut first, mut near, mut count) = (0.0, 0.0, 0.0);
    for (row, values) in rows {
        first += values[0];
        near += values[row - NEAR..=row].iter().sum::<f32>();
        count += 1.0;
    }
    [first, near].map(|sum| 100.0 * sum / count)
}
