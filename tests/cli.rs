//! The program as a user meets it: files in, files out, messages, exit codes.
#![cfg(feature = "cli")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::OnceLock;

use common::{Data, Expected, compare};
use half::f16;
use npyz::WriterBuilder;
use wgpu_attention::ops::attention::alibi_slopes;
use wgpu_attention::{
    AttentionDesc, Batch, DType, HostInput, HostMask, HostOutput, Layout, Lengths, ScoreLayout, Start, Window,
};

const RECORDING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/smollm2-135m-attention.safetensors");

/// The program, with a cache of the tests' own, into which the first call brings the verdicts on all adapters.
fn program(args: &[&str]) -> Command {
    static CACHE: OnceLock<PathBuf> = OnceLock::new();
    let cache = CACHE.get_or_init(|| {
        let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cli-cache");
        let output = program_with(&cache, &["info"]).output().expect("the program starts");
        assert!(output.status.success(), "{}", stderr(&output));
        cache
    });
    program_with(cache, args)
}

/// The program, under the same wrapper as the tests if there is one.
fn program_with(cache: &Path, args: &[&str]) -> Command {
    let binary = env!("CARGO_BIN_EXE_wgpu-attention");
    let mut command = match std::env::var("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER") {
        Ok(runner) if !runner.is_empty() => {
            let mut command = Command::new(runner);
            command.arg(binary);
            command
        }
        _ => Command::new(binary),
    };
    command.args(args).env("XDG_CACHE_HOME", cache).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

fn run(args: &[&str]) -> Output {
    program(args).output().expect("the program starts")
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

fn succeed(args: &[&str]) -> String {
    let output = run(args);
    assert!(output.status.success(), "{args:?}: {}", stderr(&output));
    stdout(&output)
}

/// Fails in the way that every failure has: a code, one line, no panic.
fn fail(args: &[&str], code: i32, expected: &str) {
    let output = run(args);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(code), "{args:?}: {message}");
    assert!(message.contains(expected), "{args:?}: expected `{expected}` in: {message}");
    assert!(message.starts_with("error: ") && !message.contains("panicked"), "{args:?}: {message}");
    if code == 1 {
        assert_eq!(message.lines().count(), 1, "{args:?}: {message}");
    }
}

/// The adapters of this machine, as `--adapter` takes them.
fn adapters() -> Vec<String> {
    let info: serde_json::Value = serde_json::from_str(&succeed(&["info", "--json"])).unwrap();
    let adapters = info["adapters"].as_array().unwrap();
    adapters.iter().map(|adapter| adapter["name"].as_str().unwrap().to_string()).collect()
}

/// A folder of tensors.
struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Folder(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_string()
    }

    fn save<T: npyz::AutoSerialize + Clone>(&self, name: &str, shape: &[u64], values: &[T]) {
        let file = fs::File::create(self.path(name)).unwrap();
        let options = npyz::WriteOptions::new().default_dtype().shape(shape);
        let mut writer = options.writer(file).begin_nd().unwrap();
        writer.extend(values.iter().cloned()).unwrap();
        writer.finish().unwrap();
    }

    fn load(&self, name: &str) -> (Vec<u64>, String, Vec<f32>) {
        let bytes = fs::read(self.path(name)).unwrap();
        let file = npyz::NpyFile::new(&bytes[..]).unwrap();
        let (shape, kind) = (file.shape().to_vec(), file.dtype().descr());
        let values = match kind.as_str() {
            "'<f2'" => file.into_vec::<f16>().unwrap().into_iter().map(f16::to_f32).collect(),
            _ => file.into_vec::<f32>().unwrap(),
        };
        (shape, kind, values)
    }

    /// Runs `attend` on the files q, k and v of this folder, and reads what it wrote.
    fn attend(&self, adapter: &str, args: &[&str]) -> HostOutput {
        let (q, k, v) = (self.path("q.npy"), self.path("k.npy"), self.path("v.npy"));
        let (out, lse) = (self.path("out.npy"), self.path("lse.npy"));
        let mut all = vec!["attend", "--q", &q, "--k", &k, "--v", &v, "--out", &out, "--lse", &lse];
        all.extend(["--adapter", adapter]);
        all.extend(args);
        succeed(&all);
        HostOutput { out: self.load("out.npy").2, lse: self.load("lse.npy").2 }
    }
}

/// One computation on files, and the same in the test's own terms.
struct Case<'a> {
    name: &'a str,
    args: Vec<String>,
    desc: AttentionDesc,
    batch: Batch<'a>,
    input: HostInput<'a>,
    folder: Folder,
}

impl Case<'_> {
    fn check(&self, adapters: &[String]) {
        let expected = Expected::of(&self.desc, &self.batch, &self.input);
        let args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        for adapter in adapters.iter().map(String::as_str).chain(["oracle"]) {
            let got = self.folder.attend(adapter, &args);
            expected.check(&got, true, &format!("{} on {adapter}", self.name));
        }
    }
}

/// Q, K and V for a description, as numbers and as files of f32 with these shapes.
struct Qkv {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Qkv {
    fn new(folder: &Folder, q: &[u64], k: &[u64], v: &[u64]) -> Self {
        let mut data = Data::new(7);
        let mut tensor = |name: &str, shape: &[u64]| {
            let values = data.tensor(shape.iter().product::<u64>() as usize, DType::F32);
            folder.save(name, shape, &values);
            values
        };
        Qkv { q: tensor("q.npy", q), k: tensor("k.npy", k), v: tensor("v.npy", v) }
    }

    fn input(&self) -> HostInput<'_> {
        HostInput { q: &self.q, k: &self.k, v: &self.v, bias: None, mask: HostMask::None }
    }
}

fn uniform(batch: u32, len: u32) -> Lengths<'static> {
    Lengths::Uniform { batch, len }
}

fn heads(heads: u32, kv_heads: u32, head_dim: u32, v_dim: u32) -> AttentionDesc {
    AttentionDesc { heads, kv_heads, head_dim, v_head_dim: Some(v_dim), lse: true, ..AttentionDesc::default() }
}

fn strings(args: &[&str]) -> Vec<String> {
    args.iter().map(|arg| arg.to_string()).collect()
}

#[test]
fn dense() {
    let folder = Folder::new();
    let data = Qkv::new(&folder, &[2, 19, 6, 12], &[2, 33, 2, 12], &[2, 33, 2, 20]);
    let desc = heads(6, 2, 12, 20);
    let batch = Batch::new(&desc, uniform(2, 19), uniform(2, 33));
    let case = Case { name: "dense", args: Vec::new(), desc, batch, input: data.input(), folder };
    case.check(&adapters());
    assert_eq!(case.folder.load("out.npy").0, [2, 19, 6, 20]);
    assert_eq!(case.folder.load("lse.npy").0, [2, 6, 19]);
}

#[test]
fn heads_before_rows_with_every_option_of_scores() {
    let folder = Folder::new();
    let data = Qkv::new(&folder, &[2, 4, 21, 16], &[2, 4, 30, 16], &[2, 4, 30, 8]);
    let sinks = [0.5, -1.0, 2.0, 0.0];
    folder.save("sinks.npy", &[4], &sinks);
    let desc = AttentionDesc {
        scale: Some(-0.3),
        causal: true,
        window: Window { left: Some(9), right: None },
        softcap: Some(5.0),
        alibi: Some(alibi_slopes(4)),
        sinks: Some(sinks.to_vec()),
        ..heads(4, 4, 16, 8)
    };
    let batch = Batch {
        q_layout: Layout::bhsd(21, 4, 16),
        k_layout: Layout::bhsd(30, 4, 16),
        v_layout: Layout::bhsd(30, 4, 8),
        out_layout: Layout::bhsd(21, 4, 8),
        ..Batch::new(&desc, uniform(2, 21), uniform(2, 30))
    };
    let mut args =
        strings(&["--layout", "bhsd", "--causal", "--window", "9,none", "--softcap", "5", "--scale", "-0.3"]);
    args.extend(strings(&["--alibi", "--sinks", &folder.path("sinks.npy")]));
    let case = Case { name: "bhsd", args, desc, batch, input: data.input(), folder };
    case.check(&adapters());
    assert_eq!(case.folder.load("out.npy").0, [2, 4, 21, 8]);
}

#[test]
fn bias_and_mask_broadcast() {
    let folder = Folder::new();
    let data = Qkv::new(&folder, &[2, 9, 3, 8], &[2, 17, 3, 8], &[2, 17, 3, 8]);
    let mut random = Data::new(3);
    let bias = random.tensor(3 * 17, DType::F32);
    folder.save("bias.npy", &[3, 1, 17], &bias);
    let mask: Vec<bool> = (0..2 * 9 * 17).map(|_| random.below(3) > 0).collect();
    folder.save("mask.npy", &[2, 1, 9, 17], &mask);
    let bytes: Vec<u8> = mask.iter().map(|x| u8::from(*x)).collect();
    folder.save("slopes.npy", &[3], &[0.1f32, 0.2, 0.3]);
    let desc = AttentionDesc {
        bias: Some(DType::F32),
        mask: Some(wgpu_attention::MaskKind::Bool),
        alibi: Some(vec![0.1, 0.2, 0.3]),
        ..heads(3, 3, 8, 8)
    };
    let scores = [2, 3, 9, 17];
    let batch = Batch {
        bias_layout: ScoreLayout::broadcast(&[3, 1, 17], scores),
        mask_layout: ScoreLayout::broadcast(&[2, 1, 9, 17], scores),
        ..Batch::new(&desc, uniform(2, 9), uniform(2, 17))
    };
    let input = HostInput { bias: Some(&bias), mask: HostMask::Bool(&bytes), ..data.input() };
    let (bias, mask, slopes) = (folder.path("bias.npy"), folder.path("mask.npy"), folder.path("slopes.npy"));
    let args = strings(&["--bias", &bias, "--mask", &mask, "--alibi", &slopes]);
    Case { name: "bias and mask", args, desc, batch, input, folder }.check(&adapters());
}

#[test]
fn ragged() {
    let folder = Folder::new();
    let (q_offsets, kv_offsets) = ([0u32, 5, 5, 24, 25], [0u32, 9, 20, 50, 50]);
    folder.save("qo.npy", &[5], &q_offsets.map(i64::from));
    folder.save("ko.npy", &[5], &kv_offsets.map(|x| x as i32));
    let mut random = Data::new(5);
    let bias = random.tensor(19 * 30, DType::F32);
    folder.save("bias.npy", &[19, 30], &bias);
    let mut args =
        strings(&["--causal", "--q-offsets", &folder.path("qo.npy"), "--kv-offsets", &folder.path("ko.npy")]);
    args.extend(strings(&["--bias", &folder.path("bias.npy")]));
    let desc = AttentionDesc { causal: true, bias: Some(DType::F32), ..heads(4, 2, 8, 8) };
    let layout = ScoreLayout::broadcast(&[19, 30], [4, 4, 19, 30]).unwrap();
    let (q, kv) = (Lengths::Ragged { offsets: &q_offsets }, Lengths::Ragged { offsets: &kv_offsets });
    let batch = Batch { bias_layout: Some(layout), ..Batch::new(&desc, q, kv) };
    let data = Qkv::new(&folder, &[25, 4, 8], &[50, 2, 8], &[50, 2, 8]);
    let input = HostInput { bias: Some(&bias), ..data.input() };
    let case = Case { name: "ragged", args: args.clone(), desc: desc.clone(), batch, input, folder };
    case.check(&adapters());
    assert_eq!(case.folder.load("out.npy").0, [25, 4, 8]);
    assert_eq!(case.folder.load("lse.npy").0, [4, 25]);

    let folder = case.folder;
    let data = Qkv::new(&folder, &[4, 25, 8], &[2, 50, 8], &[2, 50, 8]);
    let batch = Batch {
        q_layout: Layout::bhsd(25, 4, 8),
        k_layout: Layout::bhsd(50, 2, 8),
        v_layout: Layout::bhsd(50, 2, 8),
        out_layout: Layout::bhsd(25, 4, 8),
        ..batch
    };
    let input = HostInput { bias: Some(&bias), ..data.input() };
    args.extend(strings(&["--layout", "bhsd"]));
    Case { name: "ragged bhsd", args, desc, batch, input, folder }.check(&adapters()[..1]);
}

#[test]
fn padded_keys_and_starts() {
    let folder = Folder::new();
    let data = Qkv::new(&folder, &[3, 7, 2, 8], &[3, 20, 1, 8], &[3, 20, 1, 8]);
    folder.save("lens.npy", &[3], &[20u8, 0, 13]);
    folder.save("starts.npy", &[3], &[4i64, 0, -3]);
    let mask: Vec<u8> = (0..20).map(|j| u8::from(j % 4 != 1)).collect();
    folder.save("mask.npy", &[1, 20], &mask);
    let desc = AttentionDesc { causal: true, mask: Some(wgpu_attention::MaskKind::Bool), ..heads(2, 1, 8, 8) };
    let kv = Lengths::Padded { max_len: 20, lens: &[20, 0, 13] };
    let mask_layout = ScoreLayout::broadcast(&[1, 20], [3, 2, 7, 20]);
    let input = HostInput { mask: HostMask::Bool(&mask), ..data.input() };
    let args = strings(&["--causal", "--kv-lens", &folder.path("lens.npy"), "--mask", &folder.path("mask.npy")]);
    let starts = folder.path("starts.npy");
    let mut case = Case { name: "", args, batch: Batch::new(&desc, uniform(3, 7), kv), desc, input, folder };
    case.batch.mask_layout = mask_layout;
    let given = [4, 0, -3];
    for (name, start) in
        [("bottom-right", Start::BottomRight), ("top-left", Start::TopLeft), (&*starts, Start::Explicit(&given))]
    {
        let mut args = case.args.clone();
        args.extend(strings(&["--q-start", name]));
        let batch = Batch { start, ..case.batch };
        let one = Case { name, args, desc: case.desc.clone(), batch, input: case.input, folder: case.folder };
        one.check(&adapters()[..1]);
        case.folder = one.folder;
    }
}

#[test]
fn types() {
    let shapes: [&[u64]; 3] = [&[1, 10, 2, 16], &[1, 14, 2, 16], &[1, 14, 2, 8]];
    for (dtype, flag) in [(DType::F16, "f16"), (DType::Bf16, "bf16"), (DType::F32, "f32")] {
        for in_f16 in [false, true] {
            let folder = Folder::new();
            let mut data = Qkv::new(&folder, shapes[0], shapes[1], shapes[2]);
            for (name, shape, values) in [
                ("q.npy", shapes[0], &mut data.q),
                ("k.npy", shapes[1], &mut data.k),
                ("v.npy", shapes[2], &mut data.v),
            ] {
                if in_f16 {
                    let halves: Vec<f16> = values.iter().map(|x| f16::from_f32(*x)).collect();
                    folder.save(name, shape, &halves);
                    *values = halves.iter().map(|x| x.to_f32()).collect();
                }
                values.iter_mut().for_each(|x| *x = dtype.round(*x));
            }
            let out_dtype = if in_f16 { DType::F16 } else { DType::F32 };
            let desc = AttentionDesc { q_dtype: dtype, kv_dtype: dtype, out_dtype, ..heads(2, 2, 16, 8) };
            let batch = Batch::new(&desc, uniform(1, 10), uniform(1, 14));
            let args = strings(&["--dtype", flag]);
            let case = Case { name: flag, args, desc, batch, input: data.input(), folder };
            case.check(&adapters()[..1]);
            assert_eq!(case.folder.load("out.npy").1, if in_f16 { "'<f2'" } else { "'<f4'" });
            assert_eq!(case.folder.load("lse.npy").1, "'<f4'");
        }
    }
}

#[test]
fn numbers_that_a_type_cannot_hold() {
    let folder = Folder::new();
    Qkv::new(&folder, &[1, 1, 1, 4], &[1, 1, 1, 4], &[1, 1, 1, 4]);
    folder.save("q.npy", &[1, 1, 1, 4], &[1.0f32, 70000.0, 0.0, 0.0]);
    let [q, k, v, out] = ["q.npy", "k.npy", "v.npy", "out.npy"].map(|name| folder.path(name));
    let args = ["attend", "--q", &q, "--k", &k, "--v", &v, "--out", &out, "--adapter", "oracle"];
    fail(&[&args[..], &["--dtype", "f16"]].concat(), 1, "holds 70000, too large for f16");
    succeed(&[&args[..], &["--dtype", "bf16"]].concat());
}

#[test]
fn nothing_is_valid_too() {
    for (q, kv) in [([0, 5, 2, 8], [0, 6, 2, 8]), ([2, 0, 2, 8], [2, 6, 2, 8]), ([2, 5, 2, 8], [2, 0, 2, 8])] {
        let folder = Folder::new();
        Qkv::new(&folder, &q, &kv, &kv);
        for adapter in adapters().iter().map(String::as_str).chain(["oracle"]) {
            let got = folder.attend(adapter, &[]);
            assert_eq!(folder.load("out.npy").0, q);
            assert_eq!(got.out, vec![0.0; got.out.len()], "{adapter}");
            assert_eq!(folder.load("lse.npy").0, [q[0], q[2], q[1]]);
            assert_eq!(got.lse, vec![f32::NEG_INFINITY; got.lse.len()], "{adapter}");
        }
    }
}

#[test]
fn safetensors_and_expected_values() {
    let folder = Folder::new();
    let result = folder.path("result.safetensors");
    let input = |name: &str| format!("{RECORDING}:layer14.{name}");
    let [q, k, v, o, l] = ["q", "k", "v", "out", "lse"].map(input);
    let attend = ["attend", "--q", &q, "--k", &k, "--v", &v];
    let (out, lse) = (format!("{result}:o"), format!("{result}:l"));
    let good = [&attend[..], &["--causal", "--out", &out, "--lse", &lse, "--expect", &o, "--expect-lse", &l]].concat();
    let text = succeed(&good);
    for part in ["adapter", "variants", "TFLOP/s", "O          as expected", "LSE        as expected"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let bytes = fs::read(&result).unwrap();
    let written = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(written.tensor("o").unwrap().shape(), [1, 132, 9, 64]);
    assert_eq!(written.tensor("o").unwrap().dtype(), safetensors::Dtype::F16);
    assert_eq!(written.tensor("l").unwrap().shape(), [1, 9, 132]);
    let got = DType::F16.decode(written.tensor("o").unwrap().data(), 132 * 9 * 64);
    let recording = fs::read(RECORDING).unwrap();
    let recording = safetensors::SafeTensors::deserialize(&recording).unwrap();
    let want = DType::F32.decode(recording.tensor("layer14.out").unwrap().data(), 132 * 9 * 64);
    compare(&got, &want.iter().map(|x| f64::from(*x)).collect::<Vec<_>>(), 2e-3, "out in f16");

    let bad = folder.path("bad.npy");
    fail(&[&attend[..], &["--expect", &o, "--out", &bad]].concat(), 1, "O is not as expected");
    fail(
        &[&attend[..], &["--causal", "--expect-lse", &l, "--tolerance", "0", "--out", &bad]].concat(),
        1,
        "LSE is not",
    );
    fail(&[&attend[..], &["--expect", &l, "--out", &bad]].concat(), 1, "has the shape [1, 9, 132]");
    assert!(!Path::new(&bad).exists());
    succeed(&[&attend[..], &["--expect", &o, "--tolerance", "1000", "--adapter", "oracle"]].concat());
}

#[test]
fn pages_change_nothing() {
    let [q, k, v, o] = ["q", "k", "v", "out"].map(|name| format!("{RECORDING}:layer14.{name}"));
    let folder = Folder::new();
    let out = folder.path("paged.npy");
    let attend = ["attend", "--q", &q, "--k", &k, "--v", &v, "--causal", "--window", "50,0"];
    for adapter in adapters().iter().map(String::as_str).chain(["oracle"]) {
        for page_len in ["1", "16", "1000"] {
            let text = succeed(&[&attend[..], &["--page-len", page_len, "--adapter", adapter, "--out", &out]].concat());
            for part in ["paged O    the same bits", "paged LSE  the same bits"] {
                assert!(text.contains(part), "{adapter}: {page_len}: {text}");
            }
        }
    }
    let expect = [&attend[..7], &["--causal", "--expect", &o]].concat();
    fail(&[&expect[..], &["--page-len", "0"]].concat(), 2, "0 is not in 1..");
    fail(&[&expect[..], &["--page-len", "536870912"]].concat(), 1, "choose a smaller --page-len");
}

#[test]
fn shows_one_head() {
    let folder = Folder::new();
    Qkv::new(&folder, &[2, 8, 2, 4], &[2, 8, 2, 4], &[2, 8, 2, 4]);
    let [q, k, v] = ["q.npy", "k.npy", "v.npy"].map(|name| folder.path(name));
    let args = ["attend", "--q", &q, "--k", &k, "--v", &v, "--causal", "--show", "1,0", "--adapter", "oracle"];
    let text = succeed(&args);
    assert!(text.contains("attention of sequence 1, head 0"), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
    // The first row sees one key, with all its weight.
    let first = text.lines().find(|line| line.starts_with("0 ")).unwrap();
    assert_eq!(first.trim_end(), "0 @@@@");
}

#[test]
fn wrong_arguments() {
    let folder = Folder::new();
    let zeros =
        |name: &str, shape: &[u64]| folder.save(name, shape, &vec![0f32; shape.iter().product::<u64>() as usize]);
    zeros("q.npy", &[2, 5, 4, 8]);
    zeros("k.npy", &[2, 6, 2, 8]);
    zeros("v.npy", &[2, 6, 2, 8]);
    zeros("two.npy", &[2, 3]);
    zeros("dim.npy", &[2, 6, 2, 4]);
    zeros("heads.npy", &[2, 6, 3, 8]);
    zeros("nohead.npy", &[2, 5, 0, 8]);
    zeros("nodim.npy", &[2, 5, 4, 0]);
    zeros("wide.npy", &[2, 5, 4, 600]);
    zeros("widek.npy", &[2, 6, 2, 600]);
    zeros("long.npy", &[2, 7, 2, 8]);
    zeros("batch.npy", &[3, 6, 2, 8]);
    zeros("total.npy", &[10, 4, 8]);
    zeros("kvtotal.npy", &[12, 2, 8]);
    zeros("four.npy", &[4]);
    zeros("five.npy", &[5]);
    folder.save("ints.npy", &[2], &[1i64, 2]);
    folder.save("qints.npy", &[2, 5, 4, 8], &[0i64; 320]);
    folder.save("lens.npy", &[2], &[6i64, 7]);
    folder.save("negative.npy", &[2], &[-1i64, 2]);
    folder.save("huge.npy", &[2], &[1i64 << 40, 2]);
    folder.save("offsets.npy", &[3], &[0i64, 4, 10]);
    folder.save("three.npy", &[4], &[0i64, 4, 8, 12]);
    folder.save("first.npy", &[3], &[1i64, 4, 10]);
    folder.save("down.npy", &[4], &[0i64, 5, 4, 10]);
    folder.save("short.npy", &[3], &[0i64, 4, 9]);
    folder.save("none.npy", &[0], &[0i64; 0]);
    folder.save("mask2.npy", &[5, 6], &[2u8; 30]);
    folder.save("inf.npy", &[4], &[f32::INFINITY; 4]);
    fs::write(folder.path("text.npy"), "1 2 3").unwrap();
    fs::write(folder.path("cut.npy"), &fs::read(folder.path("q.npy")).unwrap()[..200]).unwrap();

    // Words with an ending are files of the folder; `-q X` replaces the file of Q.
    let cases: &[(&str, i32, &str)] = &[
        ("", 2, "--out"),
        ("--out o.npy --frobnicate", 2, "--frobnicate"),
        ("--out o.npy --window 3", 2, "two sides"),
        ("--out o.npy --window -1,0", 2, "`none`"),
        ("--out o.npy --window 3,x", 2, "neither a number"),
        ("--out o.npy --window 99999999999,0", 2, "neither a number"),
        ("--out o.npy --dtype f64", 2, "possible values"),
        ("--out o.npy --layout sbhd", 2, "possible values"),
        ("--out o.npy --scale much", 2, "invalid float"),
        ("--out o.npy --show 1", 2, "like 0,3"),
        ("--out o.npy --scale nan", 1, "scale: expected a finite number"),
        ("--out o.npy --softcap 0", 1, "softcap: expected a number from 1e-30"),
        ("--out o.npy --softcap -2", 1, "softcap: expected a number from 1e-30"),
        ("--out o.npy --show 2,0", 1, "there are 2 sequences"),
        ("--out o.npy --show 0,4", 1, "there are 4 heads"),
        ("--out o.npy --tolerance 1", 1, "neither is there"),
        ("--expect q.npy --tolerance -1", 1, "from 0 on"),
        ("--expect q.npy --tolerance nan", 1, "from 0 on"),
        ("--expect k.npy", 1, "but the result has [2, 5, 4, 8]"),
        ("--expect-lse k.npy", 1, "but the result has [2, 4, 5]"),
        ("--out o.npy -q missing.npy", 1, "there is no file"),
        ("--out o.npy -q text.npy", 1, "not a .npy file"),
        ("--out o.npy -q cut.npy", 1, "in 1280 bytes"),
        ("--out o.npy -q q.bin", 1, "expected a path like"),
        ("--out o.npy -q .", 1, "expected a path like"),
        ("--out o.npy -q two.npy", 1, "[2, 3]; it must be [batch, length, heads, dim]"),
        ("--out o.npy -q total.npy", 1, "without --q-offsets it must be"),
        ("--out o.npy -q qints.npy", 1, "must hold floating-point numbers"),
        ("--out o.npy -q nohead.npy", 1, "needs a head"),
        ("--out o.npy -q nodim.npy", 1, "needs a head"),
        ("--out o.npy -q wide.npy -k widek.npy", 1, "head_dim is 600"),
        ("--out o.npy -v widek.npy", 1, "v_head_dim is 600"),
        ("--out o.npy -k dim.npy", 1, "the dim of heads differs: 8 in"),
        ("--out o.npy -k heads.npy", 1, "the number of heads differs: 3 in"),
        ("--out o.npy -k heads.npy -v heads.npy", 1, "must be a multiple"),
        ("--out o.npy -k long.npy", 1, "the length differs: 7 in"),
        ("--out o.npy -k batch.npy", 1, "the number of sequences differs: 3 in"),
        ("--out o.npy -k batch.npy -v batch.npy", 1, "the number of sequences differs: 2 in Q, 3 in K"),
        ("--out o.npy --layout bhsd", 1, "5 heads of"),
        ("--out o.npy --q-offsets offsets.npy", 1, "with --q-offsets it must be [total, heads, dim]"),
        ("--out o.npy -q total.npy --q-offsets first.npy", 1, "must begin with 0"),
        ("--out o.npy -q total.npy --q-offsets none.npy", 1, "must begin with 0"),
        ("--out o.npy -q total.npy --q-offsets down.npy", 1, "must not descend"),
        ("--out o.npy -q total.npy --q-offsets short.npy", 1, "must end with 10"),
        ("--out o.npy -q total.npy --q-offsets four.npy", 1, "must hold integers"),
        ("--out o.npy -q total.npy --q-offsets two.npy", 1, "must be a list"),
        (
            "--out o.npy -q total.npy --q-offsets offsets.npy -k kvtotal.npy -v kvtotal.npy --kv-offsets three.npy",
            1,
            "2 in Q, 3 in K and V",
        ),
        ("--out o.npy --kv-lens lens.npy --kv-offsets three.npy", 2, "cannot be used with"),
        ("--out o.npy --kv-lens lens.npy", 1, "holds the length 7"),
        ("--out o.npy --kv-lens three.npy", 1, "holds 4 lengths; 2 are needed"),
        ("--out o.npy --kv-lens negative.npy", 1, "holds -1, which is too small"),
        ("--out o.npy --kv-lens huge.npy", 1, "which is too large"),
        ("--out o.npy --kv-lens five.npy", 1, "must hold integers"),
        ("--out o.npy --q-start middle", 1, "--q-start is bottom-right, top-left or a list"),
        ("--out o.npy --q-start three.npy", 1, "holds 4 starts; 2 are needed"),
        ("--out o.npy --q-start huge.npy", 1, "which is too large"),
        ("--out o.npy --alibi five.npy", 1, "holds 5 numbers; 4 are needed"),
        ("--out o.npy --alibi inf.npy", 1, "alibi slopes: expected finite numbers"),
        ("--out o.npy --alibi ints.npy", 1, "must hold floating-point numbers"),
        ("--out o.npy --sinks five.npy", 1, "holds 5 numbers; 4 are needed"),
        ("--out o.npy --sinks inf.npy", 1, "sinks: expected finite numbers"),
        ("--out o.npy --bias five.npy", 1, "does not broadcast to [2, 4, 5, 6]"),
        ("--out o.npy --mask four.npy", 1, "does not broadcast to [2, 4, 5, 6]"),
        ("--out o.npy --mask mask2.npy", 1, "must hold only 0 and 1"),
        ("--out o.txt", 1, "expected a path like"),
        ("--out none/o.npy", 1, "there is no folder"),
        ("--out o.safetensors", 1, "add a name"),
        ("--out o.npy --lse none/l.npy", 1, "there is no folder"),
        ("--out o.npy --lse o.npy", 1, "another result has the same place"),
        ("--out o.npy --variant portable", 1, "the oracle has none"),
    ];
    for (text, code, expected) in cases {
        let mut args = vec!["attend".to_string()];
        for (short, long) in [("-q", "--q"), ("-k", "--k"), ("-v", "--v")] {
            let words: Vec<&str> = text.split_whitespace().collect();
            let given = words.iter().position(|word| *word == short).map(|at| words[at + 1].to_string());
            args.extend([long.to_string(), folder.path(&given.unwrap_or(format!("{}.npy", &short[1..])))]);
        }
        let mut words = text.split_whitespace();
        while let Some(word) = words.next() {
            match word {
                "-q" | "-k" | "-v" => drop(words.next()),
                word if word.contains('.') => args.push(folder.path(word)),
                word => args.push(word.to_string()),
            }
        }
        args.extend(strings(&["--adapter", "oracle"]));
        fail(&args.iter().map(String::as_str).collect::<Vec<_>>(), *code, expected);
        for name in ["o.npy", "l.npy", "o.txt", "o.safetensors"] {
            assert!(!Path::new(&folder.path(name)).exists(), "{text} left {name}");
        }
    }
}

#[test]
fn adapters_and_variants_by_name() {
    fail(&["demo", "--adapter", "no such thing"], 1, "no adapter matches `no such thing`; there are: ");
    fail(&["demo", "--variant", "nonsense"], 1, "expected one of attention.");
    fail(&["demo", "--variant", "portable", "--adapter", "oracle"], 1, "the oracle has none");
    fail(&["info", "--adapter", "oracle"], 1, "the oracle is no adapter");
    let text = succeed(&["demo", "--adapter", &adapters()[0].to_uppercase(), "--variant", "portable"]);
    assert!(text.contains("tall.portable.") && !text.contains("subgroup"), "{text}");
}

#[test]
#[cfg(target_os = "linux")]
fn no_adapter_at_all() {
    let output = program(&["info"])
        .env("VK_DRIVER_FILES", "/dev/null")
        .env("VK_ICD_FILENAMES", "/dev/null")
        .env_remove("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER")
        .output()
        .unwrap();
    // A wrapper brings its own driver.
    if std::env::var_os("CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUNNER").is_none() {
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr(&output).contains("apt install mesa-vulkan-drivers"), "{}", stderr(&output));
    }
}

#[test]
fn the_cache_is_only_a_cache() {
    let folder = Folder::new();
    let adapter = adapters().remove(0);
    let info = |cache: &str| {
        let mut program = program_with(Path::new(cache), &["info", "--adapter", &adapter]);
        // Mesa has a cache of its own, and says so where it has no folder for it.
        let output = program.env("HOME", cache).env("MESA_SHADER_CACHE_DISABLE", "true").output().unwrap();
        assert!(output.status.success(), "{cache}: {}", stderr(&output));
        assert!(output.stderr.is_empty(), "{cache}: {}", stderr(&output));
    };
    info("/dev/null/no/folder");
    let cache = folder.path("cache");
    info(&cache);
    if cfg!(target_os = "linux") {
        let place = Path::new(&cache).join("wgpu-attention");
        let files: Vec<_> = fs::read_dir(&place).unwrap().map(|file| file.unwrap().path()).collect();
        assert!(!files.is_empty());
        for (i, file) in files.iter().enumerate() {
            let mut bytes = fs::read(file).unwrap();
            let middle = bytes.len() / 2;
            if i == 0 {
                bytes.truncate(middle)
            } else {
                bytes[middle] ^= 1
            }
            fs::write(file, bytes).unwrap();
        }
        info(&cache);
        fs::remove_dir_all(&place).unwrap();
        fs::write(&place, "a file where the folder should be").unwrap();
        info(&cache);
    }
}

#[test]
fn demo() {
    for adapter in adapters().iter().map(String::as_str).chain(["oracle"]) {
        let text = succeed(&["demo", "--adapter", adapter]);
        assert_eq!(text.matches("  ok").count(), 3, "{text}");
        assert!(text.lines().count() < 60, "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(!text.contains('\x1b'), "{text}");
    }
}

#[test]
fn info() {
    let text = succeed(&["info"]);
    assert!(text.lines().all(|line| line.chars().count() <= 100), "{text}");
    let json: serde_json::Value = serde_json::from_str(&succeed(&["info", "--json"])).unwrap();
    assert_eq!(json["version"], 1);
    for adapter in json["adapters"].as_array().unwrap() {
        assert!(text.contains(adapter["name"].as_str().unwrap()), "{text}");
        assert!(adapter["caps"]["workgroup_memory"].as_u64().unwrap() >= 16384, "{adapter}");
        let variants = adapter["operations"][0]["variants"].as_array().unwrap();
        let state = |variant: &serde_json::Value, state: &str| {
            variant["uses"].as_array().unwrap().iter().all(|usage| usage["state"] == state)
        };
        // On every adapter, something is chosen, and the last row serves everything.
        assert!(variants.iter().any(|variant| variant["uses"][0]["state"] == "chosen"), "{adapter}");
        assert!(!state(variants.last().unwrap(), "out"), "{adapter}");
        for variant in variants {
            for usage in variant["uses"].as_array().unwrap() {
                assert_eq!(usage["state"] == "out", usage["reason"].is_string(), "{variant}");
            }
        }
    }
}

#[test]
fn shaders() {
    let list = succeed(&["shaders"]);
    let names: Vec<&str> = list.lines().map(|line| line.split(' ').next().unwrap()).collect();
    assert!(names.len() > 50 && names.iter().any(|name| name.starts_with("merge")), "{list}");
    for (language, expected) in
        [("wgsl", "@compute"), ("wgsl-tint", "@compute"), ("msl", "kernel void"), ("hlsl", "[numthreads(")]
    {
        let text = succeed(&["shaders", names[0], "--to", language]);
        assert!(text.contains(expected), "{language}: {text}");
    }
    let spirv = run(&["shaders", names[0], "--to", "spirv"]).stdout;
    assert_eq!(spirv[..4], [0x03, 0x02, 0x23, 0x07]);

    let folder = Folder::new();
    let out = folder.path("made/of/it");
    succeed(&["shaders", "--to", "spirv", "--out", &out]);
    let files: Vec<_> = fs::read_dir(&out).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(files.len(), names.len(), "every module has a file of its own");
    fail(&["shaders", "nonsense"], 1, "no module is called `nonsense`");
    fail(&["shaders", "--to", "msl"], 1, "modules match; give the name of one");
    fail(&["shaders", "--variant", "nonsense"], 1, "no module is of the variant");
    fail(&["shaders", "--out", RECORDING], 1, "cannot make the folder");
}

#[test]
fn usage() {
    let nothing = run(&[]);
    assert_eq!(nothing.status.code(), Some(2));
    assert!(stderr(&nothing).contains("Usage:"));
    fail(&["frobnicate"], 2, "unrecognized subcommand");
    for command in ["demo", "attend", "info", "shaders", "bench"] {
        let text = succeed(&[command, "--help"]);
        assert!(text.contains("--adapter") && text.contains("--variant"), "{text}");
    }
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    for args in [&["shaders"][..], &["demo", "--adapter", "oracle"], &["attend", "--help"]] {
        let mut child = program(args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", stderr(&output));
        assert!(output.stderr.is_empty(), "{args:?}: {}", stderr(&output));
    }
}
