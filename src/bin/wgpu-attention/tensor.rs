//! Reads and writes tensors named on the command line: `q.npy` or `model.safetensors:q`.
//!
//! Files are untrusted: every size that a header claims is compared with the length of the file
//! before memory is taken for it. The `.npy` header is parsed here because npyz can be made to
//! hang (24 opening braces) or to panic (a shape whose product overflows).

use std::borrow::Cow;
use std::cmp::Reverse;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail, ensure};
use half::{bf16, f16};
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

/// Element type in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileType {
    F64,
    F32,
    F16,
    BF16,
    Bool,
    U8,
    I8,
    I16,
    U16,
    I32,
    U32,
    I64,
    U64,
}

impl FileType {
    fn size(self) -> usize {
        match self {
            FileType::Bool | FileType::U8 | FileType::I8 => 1,
            FileType::F16 | FileType::BF16 | FileType::I16 | FileType::U16 => 2,
            FileType::F32 | FileType::I32 | FileType::U32 => 4,
            FileType::F64 | FileType::I64 | FileType::U64 => 8,
        }
    }
}

impl fmt::Display for FileType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&format!("{self:?}").to_lowercase())
    }
}

/// The values of a tensor in C order, in the widest type of their kind.
#[derive(Clone, Debug, PartialEq)]
pub enum Data {
    Float(Vec<f32>),
    Int(Vec<i64>),
    Bool(Vec<bool>),
}

#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    pub shape: Vec<usize>,
    /// The type in the file, before the conversion to [`Data`].
    pub file_type: FileType,
    pub data: Data,
    /// What the user wrote, for messages.
    pub source: String,
}

impl Tensor {
    pub fn floats(&self) -> Result<&[f32]> {
        match &self.data {
            Data::Float(values) => Ok(values),
            _ => Err(self.wrong_type("floating-point numbers (f16, bf16, f32 or f64)")),
        }
    }

    pub fn ints(&self) -> Result<&[i64]> {
        match &self.data {
            Data::Int(values) => Ok(values),
            _ => Err(self.wrong_type("integers")),
        }
    }

    /// Booleans, or integers that are all 0 or 1, as masks are often stored.
    pub fn bools(&self) -> Result<Vec<bool>> {
        match &self.data {
            Data::Bool(values) => Ok(values.clone()),
            Data::Int(values) => match values.iter().find(|value| !(0..=1).contains(*value)) {
                None => Ok(values.iter().map(|&value| value == 1).collect()),
                Some(value) => bail!(
                    "{} is used as a mask and must hold only 0 and 1, but it holds {value}; \
                     save it as bool",
                    self.source
                ),
            },
            Data::Float(_) => Err(self.wrong_type("booleans, or integers that are 0 or 1")),
        }
    }

    fn wrong_type(&self, expected: &str) -> anyhow::Error {
        let (source, found) = (&self.source, self.file_type);
        anyhow!("{source} must hold {expected}, but it holds {found}; save it with such a type")
    }
}

/// Reads the tensor that `spec` names: `file.npy`, `file.safetensors:name`, or `file.safetensors`
/// when the file holds a single tensor.
pub fn read(spec: &str) -> Result<Tensor> {
    let content = Place::parse(spec).and_then(|place| match place {
        Place::Npy(path) => read_npy(&path),
        Place::Safetensors(path, name) => read_safetensors(&path, name.as_deref()),
    });
    let (shape, file_type, data) = content.map_err(|e| anyhow!("cannot read {spec}: {e:#}"))?;
    Ok(Tensor { shape, file_type, data, source: spec.to_owned() })
}

/// A tensor to write: `file_type` is f32, f16 or bf16. NumPy has no bf16: in `.npy` the rounded values are kept as f32.
#[derive(Clone, Copy)]
pub struct Output<'a> {
    pub spec: &'a str,
    pub shape: &'a [usize],
    pub data: &'a [f32],
    pub file_type: FileType,
}

/// Writes all tensors completely, or none. A tensor in an existing `.safetensors` file is added or replaced; the others
/// and the metadata stay.
pub fn write_all(outputs: &[Output]) -> Result<()> {
    let mut files = Vec::new();
    let mut named = Vec::<(PathBuf, Vec<(String, Output)>)>::new();
    for output in outputs {
        let prepare = || {
            let count = byte_count(output.shape, 1)?;
            ensure!(
                count == output.data.len() as u64,
                "the shape {:?} has {count} elements, but there are {} values",
                output.shape,
                output.data.len()
            );
            ensure!(
                matches!(output.file_type, FileType::F32 | FileType::F16 | FileType::BF16),
                "expected f32, f16 or bf16 as the type to write, not {}",
                output.file_type
            );
            place_to_write(output.spec)
        };
        let place = prepare().map_err(|e| cannot_write(output, e))?;
        let taken = || cannot_write(output, anyhow!("another result has the same place; choose another one"));
        match place {
            Place::Npy(path) => {
                let file = write_npy(&path, output).map_err(|e| cannot_write(output, e))?;
                ensure!(files.iter().all(|other: &NewFile| other.path != file.path), taken());
                files.push(file);
            }
            Place::Safetensors(path, name) => {
                let name = name.unwrap_or_default();
                match named.iter_mut().find(|(other, _)| *other == path) {
                    Some((_, tensors)) => {
                        ensure!(tensors.iter().all(|(other, _)| *other != name), taken());
                        tensors.push((name, *output));
                    }
                    None => named.push((path, vec![(name, *output)])),
                }
            }
        }
    }
    for (path, tensors) in &named {
        files.push(write_safetensors(path, tensors).map_err(|e| cannot_write(&tensors[0].1, e))?);
    }
    files.into_iter().try_for_each(|file| {
        let path = file.path.display().to_string();
        file.put().map_err(|e| anyhow!("cannot write {path}: {e:#}"))
    })
}

fn cannot_write(output: &Output, error: anyhow::Error) -> anyhow::Error {
    anyhow!("cannot write {}: {error:#}", output.spec)
}

/// What [`write_all`] would refuse, known before there is anything to write.
pub fn check_place(spec: &str) -> Result<()> {
    let check = || match place_to_write(spec)? {
        Place::Npy(path) | Place::Safetensors(path, _) => {
            let (_, folder, _) = file_to_replace(&path)?;
            tempfile::tempfile_in(&folder).with_context(|| no_file_in(&folder)).map(|_| ())
        }
    };
    check().map_err(|e| anyhow!("cannot write {spec}: {e:#}"))
}

fn place_to_write(spec: &str) -> Result<Place> {
    let place = Place::parse(spec)?;
    if let Place::Safetensors(_, name) = &place {
        let name = name.as_deref().with_context(|| format!("add a name for the tensor, like {spec}:out"))?;
        ensure!(name != "__metadata__", "this name has a meaning in the format; choose another one");
    }
    Ok(place)
}

enum Place {
    Npy(PathBuf),
    Safetensors(PathBuf, Option<String>),
}

impl Place {
    fn parse(spec: &str) -> Result<Place> {
        // Only the colon after this ending separates: others are drive letters or parts of names.
        const ENDING: &str = ".safetensors";
        let lower = spec.to_ascii_lowercase();
        if let Some(at) = lower.find(".safetensors:")
            && !Path::new(spec).is_file()
        {
            let (path, name) = spec.split_at(at + ENDING.len());
            ensure!(name != ":", "the name of the tensor is missing after the colon");
            return Ok(Place::Safetensors(path.into(), Some(name[1..].to_owned())));
        }
        if lower.ends_with(ENDING) {
            Ok(Place::Safetensors(spec.into(), None))
        } else if lower.ends_with(".npy") {
            Ok(Place::Npy(spec.into()))
        } else {
            bail!("expected a path like q.npy or model.safetensors:q")
        }
    }
}

/// Opens a regular file and tells its length. Anything else has no length to check headers with.
fn open(path: &Path) -> Result<(File, u64)> {
    let metadata = fs::metadata(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => anyhow!("there is no file {}; check the path", path.display()),
        _ => error.into(),
    })?;
    ensure!(!metadata.is_dir(), "this is a folder; give the path of a file in it");
    ensure!(metadata.is_file(), "this is not a regular file; copy it to one first");
    ensure!(metadata.len() > 0, "the file is empty; write it again");
    Ok((File::open(path)?, metadata.len()))
}

/// The bytes that a tensor takes, or an error when nothing in memory can have that size. Zeros are
/// counted as ones so that strides of an empty tensor cannot overflow either.
fn byte_count(shape: &[usize], element: usize) -> Result<u64> {
    let bound = shape.iter().try_fold(element, |size, &length| size.checked_mul(length.max(1)));
    ensure!(
        bound.is_some_and(|bound| isize::try_from(bound).is_ok()),
        "its shape {} is larger than any memory; the file is damaged",
        printable(&format!("{shape:?}"))
    );
    Ok(shape.iter().fold(element, |size, &length| size * length) as u64)
}

/// Text from a file, made fit for one line of a message.
fn printable(text: &str) -> String {
    let mut line: String = text.chars().take(160).map(|c| if c.is_control() { '?' } else { c }).collect();
    if line.len() < text.len() {
        line.push('…');
    }
    line
}

type Content = (Vec<usize>, FileType, Data);

fn read_npy(path: &Path) -> Result<Content> {
    // NumPy itself refuses longer headers; those of plain arrays have about 120 bytes.
    const LONGEST_HEADER: u64 = 10_000;
    const CUT: &str = "the file ends within its header; write it again";

    let (file, length) = open(path)?;
    let mut file = BufReader::new(file);
    let magic: [u8; 8] = take(&mut file).unwrap_or_default();
    ensure!(magic.starts_with(b"\x93NUMPY"), "this is not a .npy file; write it with numpy.save");
    let (prefix, header_length) = match (magic[6], magic[7]) {
        (1, 0) => (10, take(&mut file).map(|b| u16::from_le_bytes(b).into())),
        (2 | 3, 0) => (12, take(&mut file).map(|b| u32::from_le_bytes(b).into())),
        (major, minor) => bail!(
            "expected version 1.0, 2.0 or 3.0 of the format, but it has {major}.{minor}; \
             write it with numpy.save"
        ),
    };
    let header_length: u64 = header_length.ok().context(CUT)?;
    ensure!(
        header_length <= LONGEST_HEADER,
        "its header claims {header_length} bytes, more than the {LONGEST_HEADER} of a plain array; \
         write it again with numpy.save"
    );
    let header_end = prefix + header_length;
    ensure!(header_end <= length, CUT);
    let mut header = vec![0; header_length as usize];
    file.read_exact(&mut header)?;
    let header = std::str::from_utf8(&header).context("its header is not text; write it again")?;
    let Header { big_endian, file_type, fortran_order, shape } = Header::parse(header)?;

    let (expected, found) = (byte_count(&shape, file_type.size())?, length - header_end);
    ensure!(
        expected == found,
        "its header announces {shape:?} of {file_type} in {expected} bytes, but {found} follow; \
         save one array with numpy.save and copy the file completely"
    );
    let data = decode(&mut file, expected as usize / file_type.size(), file_type, big_endian)?;
    let data = match data {
        data if !fortran_order => data,
        Data::Float(values) => Data::Float(to_c_order(&values, &shape)?),
        Data::Int(values) => Data::Int(to_c_order(&values, &shape)?),
        Data::Bool(values) => Data::Bool(to_c_order(&values, &shape)?),
    };
    Ok((shape, file_type, data))
}

/// What the header of a `.npy` file says, like
/// `{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }`.
struct Header {
    big_endian: bool,
    file_type: FileType,
    fortran_order: bool,
    shape: Vec<usize>,
}

impl Header {
    fn parse(text: &str) -> Result<Header> {
        let (mut descr, mut fortran_order, mut shape) = (None, None, None);
        let mut words = Words(text);
        words.expect("{")?;
        while !words.accept("}") {
            let key = words.string()?;
            words.expect(":")?;
            match key {
                "descr" if words.accept("[") => bail!(
                    "expected numbers or booleans, but it holds records (a structured dtype); \
                     save each field as an array of its own"
                ),
                "descr" => descr = Some(words.string()?),
                "fortran_order" if words.accept("True") => fortran_order = Some(true),
                "fortran_order" => {
                    words.expect("False")?;
                    fortran_order = Some(false);
                }
                "shape" => shape = Some(words.lengths()?),
                _ => bail!("its header has the unknown key {}", printable(key)),
            }
            if !words.accept(",") {
                words.expect("}")?;
                break;
            }
        }
        ensure!(words.0.trim().is_empty(), "its header is damaged; write it again");
        let missing = |key| format!("its header does not say {key}; write it again");
        let (big_endian, file_type) = parse_descr(descr.with_context(|| missing("descr"))?)?;
        Ok(Header {
            big_endian,
            file_type,
            fortran_order: fortran_order.with_context(|| missing("fortran_order"))?,
            shape: shape.with_context(|| missing("shape"))?,
        })
    }
}

/// The rest of a header, taken word by word.
struct Words<'a>(&'a str);

impl<'a> Words<'a> {
    fn accept(&mut self, word: &str) -> bool {
        let rest = self.0.trim_start().strip_prefix(word);
        self.0 = rest.unwrap_or(self.0);
        rest.is_some()
    }

    fn expect(&mut self, word: &str) -> Result<()> {
        ensure!(
            self.accept(word),
            "its header is damaged: expected {word} before \"{}\"; write it again",
            printable(self.0.trim())
        );
        Ok(())
    }

    fn string(&mut self) -> Result<&'a str> {
        let quote = if self.accept("\"") { '"' } else { '\'' };
        if quote == '\'' {
            self.expect("'")?;
        }
        let (string, rest) =
            self.0.split_once(quote).context("its header is damaged: a quote is not closed; write it again")?;
        self.0 = rest;
        Ok(string)
    }

    fn lengths(&mut self) -> Result<Vec<usize>> {
        // What NumPy allows.
        const MOST_AXES: usize = 64;
        let mut lengths = Vec::new();
        self.expect("(")?;
        while !self.accept(")") {
            ensure!(lengths.len() < MOST_AXES, "its shape has more than {MOST_AXES} axes; the file is damaged");
            let rest = self.0.trim_start();
            let end = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            let (digits, rest) = rest.split_at(end);
            lengths.push(
                digits
                    .parse()
                    .map_err(|_| anyhow!("its shape is not made of lengths: \"{}\"", printable(self.0.trim())))?,
            );
            self.0 = rest;
            // Python 2 wrote 3L on some systems.
            self.accept("L");
            if !self.accept(",") {
                self.expect(")")?;
                break;
            }
        }
        Ok(lengths)
    }
}

/// The byte order and type in a NumPy description like `<f4`.
fn parse_descr(descr: &str) -> Result<(bool, FileType)> {
    let (big_endian, kind) = match descr.split_at_checked(1) {
        Some(("<" | "|", kind)) => (false, kind),
        Some((">", kind)) => (true, kind),
        Some(("=", kind)) => (cfg!(target_endian = "big"), kind),
        _ => (cfg!(target_endian = "big"), descr),
    };
    let file_type = match kind {
        "f8" => FileType::F64,
        "f4" => FileType::F32,
        "f2" => FileType::F16,
        "b1" | "?" => FileType::Bool,
        "u1" => FileType::U8,
        "i1" => FileType::I8,
        "i2" => FileType::I16,
        "u2" => FileType::U16,
        "i4" => FileType::I32,
        "u4" => FileType::U32,
        "i8" => FileType::I64,
        "u8" => FileType::U64,
        "V2" => bail!(
            "it holds raw bytes (dtype V2), as bfloat16 becomes in .npy; \
             save it as float32, or as bf16 in a .safetensors file"
        ),
        "O" => bail!("it holds Python objects, which are never loaded; save an array of numbers"),
        _ => bail!(
            "expected floats, integers or booleans, but it holds dtype {}; \
             convert it with array.astype('float32')",
            printable(descr)
        ),
    };
    Ok((big_endian, file_type))
}

fn take<const N: usize>(file: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn decode(file: &mut impl Read, count: usize, kind: FileType, big_endian: bool) -> Result<Data> {
    let mut source = Elements { file, count, big_endian };
    Ok(match kind {
        FileType::F64 => Data::Float(source.read(|b| f64::from_le_bytes(b) as f32)?),
        FileType::F32 => Data::Float(source.read(f32::from_le_bytes)?),
        FileType::F16 => Data::Float(source.read(|b| f16::from_le_bytes(b).to_f32())?),
        FileType::BF16 => Data::Float(source.read(|b| bf16::from_le_bytes(b).to_f32())?),
        FileType::Bool => Data::Bool(source.read(|[b]: [u8; 1]| b != 0)?),
        FileType::U8 => Data::Int(source.read(|b| u8::from_le_bytes(b).into())?),
        FileType::I8 => Data::Int(source.read(|b| i8::from_le_bytes(b).into())?),
        FileType::I16 => Data::Int(source.read(|b| i16::from_le_bytes(b).into())?),
        FileType::U16 => Data::Int(source.read(|b| u16::from_le_bytes(b).into())?),
        FileType::I32 => Data::Int(source.read(|b| i32::from_le_bytes(b).into())?),
        FileType::U32 => Data::Int(source.read(|b| u32::from_le_bytes(b).into())?),
        FileType::I64 => Data::Int(source.read(i64::from_le_bytes)?),
        FileType::U64 => {
            let values = source.read(i64::from_le_bytes)?;
            // Read as i64, the values above i64::MAX are the negative ones.
            if let Some(&value) = values.iter().find(|value| **value < 0) {
                bail!("it holds {}, above the largest i64; save it as int64", value as u64);
            }
            Data::Int(values)
        }
    })
}

struct Elements<'a, R> {
    file: &'a mut R,
    count: usize,
    big_endian: bool,
}

impl<R: Read> Elements<'_, R> {
    fn read<T, const N: usize>(&mut self, convert: impl Fn([u8; N]) -> T) -> Result<Vec<T>> {
        let mut values = with_room(self.count)?;
        let mut block = [[0; N]; 4096];
        while values.len() < self.count {
            let length = block.len().min(self.count - values.len());
            let part = &mut block[..length];
            self.file.read_exact(part.as_flattened_mut())?;
            if self.big_endian {
                part.iter_mut().for_each(|bytes| bytes.reverse());
            }
            values.extend(part.iter().map(|&bytes| convert(bytes)));
        }
        Ok(values)
    }
}

/// An empty vector for `count` elements, or an error where `Vec` would abort the program.
fn with_room<T>(count: usize) -> Result<Vec<T>> {
    let mut values = Vec::new();
    let room = values.try_reserve_exact(count);
    room.with_context(|| format!("its {count} elements do not fit in memory"))?;
    Ok(values)
}

/// Reorders Fortran order (the first index runs fastest) into C order (the last one does).
fn to_c_order<T: Copy>(values: &[T], shape: &[usize]) -> Result<Vec<T>> {
    let mut strides = vec![1; shape.len()];
    for axis in 1..shape.len() {
        strides[axis] = strides[axis - 1] * shape[axis - 1];
    }
    let mut ordered = with_room(values.len())?;
    let mut index = vec![0; shape.len()];
    let mut from = 0;
    for _ in values {
        ordered.push(values[from]);
        for axis in (0..shape.len()).rev() {
            index[axis] += 1;
            from += strides[axis];
            if index[axis] < shape[axis] {
                break;
            }
            from -= strides[axis] * shape[axis];
            index[axis] = 0;
        }
    }
    Ok(ordered)
}

/// A `.safetensors` file whose header has been checked against its length.
struct Archive {
    file: File,
    metadata: Metadata,
    /// Where the bytes of the tensors begin.
    start: u64,
}

impl Archive {
    fn open(path: &Path) -> Result<Archive> {
        // The limit of the format.
        const LONGEST_HEADER: u64 = 100_000_000;
        const DAMAGED: &str = "this is not a complete .safetensors file";

        let (mut file, length) = open(path)?;
        ensure!(length >= 8, "{DAMAGED}: it has only {length} bytes");
        let header_length = u64::from_le_bytes(take(&mut file)?);
        let most = LONGEST_HEADER.min(length - 8);
        ensure!(
            header_length <= most,
            "{DAMAGED}: its header claims {header_length} bytes, but at most {most} are possible; \
             copy or write it again"
        );
        let mut header = vec![0; header_length as usize];
        file.read_exact(&mut header)?;
        // This also checks that shapes, types and offsets agree and that tensors do not overlap.
        let metadata: Metadata = serde_json::from_slice(&header).map_err(|error| {
            let error = printable(&error.to_string());
            anyhow!("{DAMAGED}: its header says {error}; copy or write it again")
        })?;
        let start = 8 + header_length;
        let (expected, found) = (metadata.data_len() as u64, length - start);
        ensure!(
            expected == found,
            "{DAMAGED}: expected {expected} bytes of data after its header, but {found} follow; \
             copy or write it again"
        );
        Ok(Archive { file, metadata, start })
    }

    fn seek(&mut self, info: &TensorInfo) -> Result<()> {
        self.file.seek(SeekFrom::Start(self.start + info.data_offsets.0 as u64))?;
        Ok(())
    }

    /// The names for a message, not too many of them.
    fn names(&self) -> String {
        const MOST: usize = 20;
        let mut names = self.metadata.offset_keys();
        names.sort();
        let mut text = names.iter().take(MOST).map(|name| printable(name)).collect::<Vec<_>>().join(", ");
        if names.len() > MOST {
            text += &format!(", … and {} more", names.len() - MOST);
        }
        text
    }
}

fn read_safetensors(path: &Path, name: Option<&str>) -> Result<Content> {
    let mut archive = Archive::open(path)?;
    let all = archive.metadata.offset_keys();
    let name = match (name, all.as_slice()) {
        (_, []) => bail!("the file holds no tensor"),
        (Some(name), _) => name,
        (None, [single]) => single,
        (None, _) => bail!(
            "the file holds {} tensors; add the name of one, like {}:{}; they are {}",
            all.len(),
            path.display(),
            printable(&all[0]),
            archive.names()
        ),
    };
    let Some(info) = archive.metadata.info(name).cloned() else {
        bail!("the file has no tensor {name}; it holds {}", archive.names());
    };
    let file_type = match info.dtype {
        Dtype::F64 => FileType::F64,
        Dtype::F32 => FileType::F32,
        Dtype::F16 => FileType::F16,
        Dtype::BF16 => FileType::BF16,
        Dtype::BOOL => FileType::Bool,
        Dtype::U8 => FileType::U8,
        Dtype::I8 => FileType::I8,
        Dtype::I16 => FileType::I16,
        Dtype::U16 => FileType::U16,
        Dtype::I32 => FileType::I32,
        Dtype::U32 => FileType::U32,
        Dtype::I64 => FileType::I64,
        Dtype::U64 => FileType::U64,
        other => bail!(
            "expected floats of 16, 32 or 64 bits, integers or booleans, but it holds {other}; \
             convert it to f16 or f32"
        ),
    };
    let count = byte_count(&info.shape, file_type.size())? as usize / file_type.size();
    archive.seek(&info)?;
    let data = decode(&mut archive.file, count, file_type, false)?;
    Ok((info.shape, file_type, data))
}

fn write_npy(path: &Path, output: &Output) -> Result<NewFile> {
    let Output { shape, data, file_type, .. } = *output;
    let rounded = |x: &f32| bf16::from_f32(*x).to_f32();
    let (descr, file_type, data) = match file_type {
        FileType::BF16 => ("<f4", FileType::F32, data.iter().map(rounded).collect()),
        FileType::F16 => ("<f2", file_type, Cow::from(data)),
        _ => ("<f4", file_type, Cow::from(data)),
    };
    let mut lengths = shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    if shape.len() == 1 {
        lengths.push(',');
    }
    let mut header = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({lengths}), }}");
    // NumPy wants a line break at the end of the header, and the data aligned to 64 bytes.
    let unpadded = 10 + header.len() + 1;
    header += &" ".repeat(unpadded.next_multiple_of(64) - unpadded);
    header.push('\n');
    let header_length = u16::try_from(header.len()).context("the shape has too many axes")?;

    NewFile::write(path, |out| {
        out.write_all(b"\x93NUMPY\x01\x00")?;
        out.write_all(&header_length.to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        encode(out, &data, file_type)
    })
}

fn write_safetensors(path: &Path, new: &[(String, Output)]) -> Result<NewFile> {
    let find = |name: &str| new.iter().find(|(other, _)| other == name).map(|(_, output)| output);
    let mut tensors = Vec::new();
    for (name, output) in new {
        let dtype = match output.file_type {
            FileType::F16 => Dtype::F16,
            FileType::BF16 => Dtype::BF16,
            _ => Dtype::F32,
        };
        let data_offsets = (0, output.data.len() * output.file_type.size());
        tensors.push((name.clone(), TensorInfo { dtype, shape: output.shape.to_vec(), data_offsets }));
    }
    let mut old = None;
    let mut old_metadata = None;
    if path.exists() {
        let archive = Archive::open(path).context("the existing file cannot be extended")?;
        let kept = archive.metadata.tensors().into_iter().filter(|(name, _)| find(name).is_none());
        tensors.extend(kept.map(|(name, info)| (name, info.clone())));
        old_metadata = archive.metadata.metadata().clone();
        old = Some(archive);
    }

    // The order of the safetensors library: the largest elements first, which aligns them all.
    tensors.sort_by(|(a, _), (b, _)| a.cmp(b));
    tensors.sort_by_key(|(_, info)| Reverse(info.dtype));
    let mut end = 0;
    let placed = tensors.iter().map(|(name, info)| {
        let start = end;
        end += byte_length(info);
        (name.clone(), TensorInfo { data_offsets: (start, end), ..info.clone() })
    });
    let metadata = Metadata::new(old_metadata, placed.collect())?;
    // Through a value, because that sorts the entries of the metadata.
    let header = serde_json::to_value(metadata)?.to_string();
    let padding = header.len().next_multiple_of(8) - header.len();

    NewFile::write(path, |out| {
        out.write_all(&((header.len() + padding) as u64).to_le_bytes())?;
        out.write_all(header.as_bytes())?;
        out.write_all(&b"       "[..padding])?;
        for (tensor, info) in &tensors {
            match (find(tensor), &mut old) {
                (Some(output), _) => encode(out, output.data, output.file_type)?,
                (None, Some(archive)) => {
                    archive.seek(info)?;
                    let length = byte_length(info) as u64;
                    let copied = io::copy(&mut (&archive.file).take(length), out)?;
                    ensure!(copied == length, "the existing file changed while it was copied");
                }
                (None, None) => bail!("the existing file changed while it was copied"),
            }
        }
        Ok(())
    })
}

fn byte_length(info: &TensorInfo) -> usize {
    info.data_offsets.1 - info.data_offsets.0
}

fn encode(out: &mut impl Write, data: &[f32], file_type: FileType) -> Result<()> {
    for &value in data {
        match file_type {
            FileType::F16 => {
                let rounded = f16::from_f32(value);
                ensure!(
                    rounded.is_finite() || !value.is_finite(),
                    "the value {value} is too large for f16; write bf16 or f32"
                );
                out.write_all(&rounded.to_le_bytes())?;
            }
            FileType::BF16 => out.write_all(&bf16::from_f32(value).to_le_bytes())?,
            _ => out.write_all(&value.to_le_bytes())?,
        }
    }
    Ok(())
}

/// A complete file beside the one that it is to replace, so that a failure leaves no part of one.
struct NewFile {
    file: tempfile::NamedTempFile,
    path: PathBuf,
}

impl NewFile {
    fn write(path: &Path, write: impl FnOnce(&mut BufWriter<&File>) -> Result<()>) -> Result<NewFile> {
        let (path, folder, permissions) = file_to_replace(path)?;
        let mut builder = tempfile::Builder::new();
        builder.prefix(".wgpu-attention-");
        // Temporary files are private; this one becomes the result. The umask still applies.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        let file = builder.tempfile_in(&folder).with_context(|| no_file_in(&folder))?;
        let mut out = BufWriter::new(file.as_file());
        write(&mut out)?;
        out.flush()?;
        drop(out);
        file.as_file().sync_all()?;
        if let Some(permissions) = permissions {
            file.as_file().set_permissions(permissions)?;
        }
        Ok(NewFile { file, path })
    }

    fn put(self) -> Result<()> {
        self.file.persist(&self.path)?;
        Ok(())
    }
}

fn no_file_in(folder: &Path) -> String {
    format!("no file can be made in the folder {}; choose another one", folder.display())
}

/// Where a file with this name goes: path and folder with links followed, and the permissions of the file there.
fn file_to_replace(path: &Path) -> Result<(PathBuf, PathBuf, Option<fs::Permissions>)> {
    // A link stays a link: its target is replaced.
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
        _ => PathBuf::from("."),
    };
    ensure!(folder.is_dir(), "there is no folder {}; create it or choose another one", folder.display());
    let permissions = match fs::metadata(&path) {
        Ok(old) => {
            ensure!(old.is_file(), "something that is not a file has this name; choose another one");
            ensure!(
                !old.permissions().readonly(),
                "the existing file is read-only; choose another name or make it writable"
            );
            Some(old.permissions())
        }
        Err(_) => None,
    };
    Ok((path, folder, permissions))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(spec: &str, shape: &[usize], data: &[f32], file_type: FileType) -> Result<()> {
        write_all(&[Output { spec, shape, data, file_type }])
    }

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Folder {
            Folder(tempfile::tempdir().unwrap())
        }

        fn path(&self, name: &str) -> String {
            self.0.path().join(name).to_str().unwrap().to_owned()
        }

        fn file(&self, name: &str, bytes: &[u8]) -> String {
            fs::write(self.path(name), bytes).unwrap();
            self.path(name)
        }

        /// The names of all files, to see that no temporary one is left.
        fn names(&self) -> Vec<String> {
            let entries = fs::read_dir(self.0.path()).unwrap();
            let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    fn npy(version: u8, header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0x93, b'N', b'U', b'M', b'P', b'Y', version, 0];
        match version {
            1 => bytes.extend((header.len() as u16).to_le_bytes()),
            _ => bytes.extend((header.len() as u32).to_le_bytes()),
        }
        bytes.extend(header.bytes());
        bytes.extend(data);
        bytes
    }

    fn npy_of(descr: &str, fortran_order: bool, shape: &str, data: &[u8]) -> Vec<u8> {
        let fortran_order = if fortran_order { "True" } else { "False" };
        let header = format!("{{'descr': '{descr}', 'fortran_order': {fortran_order}, 'shape': {shape}, }}\n");
        npy(1, &header, data)
    }

    fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.bytes());
        bytes.extend(data);
        bytes
    }

    /// One message on one line that names the file.
    fn assert_refused(spec: &str, expected: &str) {
        let message = read(spec).unwrap_err().to_string();
        assert!(message.contains(spec), "{message}");
        assert!(message.contains(expected), "{message}\ndoes not contain {expected}");
        assert!(!message.contains(char::is_control), "{message:?}");
        assert!(message.len() < spec.len() + 2000, "{message}");
    }

    fn bytes_of<const N: usize, const M: usize>(elements: [[u8; N]; M]) -> Vec<u8> {
        elements.concat()
    }

    #[test]
    fn reads_every_type_in_both_byte_orders() {
        let little = [
            ("f8", bytes_of([1.5f64, -2.0].map(f64::to_le_bytes)), Data::Float(vec![1.5, -2.0])),
            ("f4", bytes_of([1.5f32, -2.0].map(f32::to_le_bytes)), Data::Float(vec![1.5, -2.0])),
            ("f2", bytes_of([1.5, -2.0].map(|x| f16::from_f32(x).to_le_bytes())), Data::Float(vec![1.5, -2.0])),
            ("i8", bytes_of([-3i64, i64::MAX].map(i64::to_le_bytes)), Data::Int(vec![-3, i64::MAX])),
            ("u8", bytes_of([3u64, 1 << 62].map(u64::to_le_bytes)), Data::Int(vec![3, 1 << 62])),
            ("i4", bytes_of([-3i32, 4].map(i32::to_le_bytes)), Data::Int(vec![-3, 4])),
            ("u4", bytes_of([3, u32::MAX].map(u32::to_le_bytes)), Data::Int(vec![3, 0xffff_ffff])),
            ("i2", bytes_of([-3i16, 4].map(i16::to_le_bytes)), Data::Int(vec![-3, 4])),
            ("u2", bytes_of([3, u16::MAX].map(u16::to_le_bytes)), Data::Int(vec![3, 65535])),
            ("i1", vec![0xfd, 4], Data::Int(vec![-3, 4])),
            ("u1", vec![3, 255], Data::Int(vec![3, 255])),
            ("b1", vec![0, 1], Data::Bool(vec![false, true])),
        ];
        let folder = Folder::new();
        for (kind, bytes, data) in little {
            let big = bytes.chunks(bytes.len() / 2).flat_map(|x| x.iter().rev().copied());
            for (order, bytes) in [("<", bytes.clone()), (">", big.collect()), ("|", bytes)] {
                let descr = format!("{order}{kind}");
                let spec = folder.file("x.npy", &npy_of(&descr, false, "(2,)", &bytes));
                let tensor = read(&spec).unwrap();
                assert_eq!(tensor.data, data, "{descr}");
                assert_eq!(tensor.shape, [2]);
            }
        }
    }

    #[test]
    fn reads_fortran_order() {
        // Column-major [[1, 2, 3], [4, 5, 6]], then the middle axis of 2 × 3 × 2.
        let folder = Folder::new();
        let spec = folder.file("x.npy", &npy_of("|u1", true, "(2, 3)", &[1, 4, 2, 5, 3, 6]));
        assert_eq!(read(&spec).unwrap().ints().unwrap(), [1, 2, 3, 4, 5, 6]);

        let (a, b, c) = (2, 3, 2);
        let mut data = vec![0; a * b * c];
        for (i, value) in data.iter_mut().enumerate() {
            let (x, y, z) = (i % a, i / a % b, i / (a * b));
            *value = ((x * b + y) * c + z) as u8;
        }
        let spec = folder.file("x.npy", &npy_of("|u1", true, "(2, 3, 2)", &data));
        let expected: Vec<i64> = (0..12).collect();
        assert_eq!(read(&spec).unwrap().ints().unwrap(), expected);
    }

    #[test]
    fn reads_all_header_versions_and_shapes() {
        let folder = Folder::new();
        let header = "{\"shape\": (3L,), 'fortran_order':False,'descr':'<f4'}   \n";
        let data = [0; 12];
        for version in 1..=3 {
            let spec = folder.file("x.npy", &npy(version, header, &data));
            assert_eq!(read(&spec).unwrap().shape, [3]);
        }
        for (shape, expected, bytes) in [("()", vec![], 1), ("(0,)", vec![0], 0), ("(2, 0, 3)", vec![2, 0, 3], 0)] {
            for fortran_order in [false, true] {
                let bytes = npy_of("|u1", fortran_order, shape, &data[..bytes]);
                assert_eq!(read(&folder.file("x.npy", &bytes)).unwrap().shape, expected);
            }
        }
    }

    #[test]
    fn writes_what_npyz_and_safetensors_read() {
        let folder = Folder::new();
        let data = [0.0, -1.5, 3.25, f32::INFINITY, 0.1, 1e-3];
        for shape in [&[6][..], &[2, 3], &[1, 2, 1, 3]] {
            let spec = folder.path("x.npy");
            write(&spec, shape, &data, FileType::F32).unwrap();
            let bytes = fs::read(&spec).unwrap();
            let file = npyz::NpyFile::new(&bytes[..]).unwrap();
            assert!(file.shape().iter().copied().eq(shape.iter().map(|&x| x as u64)));
            assert_eq!(file.into_vec::<f32>().unwrap(), data);
            assert_eq!((bytes.len() - 24) % 64, 0);
        }

        for (file_type, dtype) in
            [(FileType::F32, Dtype::F32), (FileType::F16, Dtype::F16), (FileType::BF16, Dtype::BF16)]
        {
            let spec = folder.path("x.safetensors:a:b");
            write(&spec, &[2, 3], &data, file_type).unwrap();
            let bytes = fs::read(folder.path("x.safetensors")).unwrap();
            let all = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(all.tensor("a:b").unwrap().dtype(), dtype);
        }
        assert_eq!(folder.names(), ["x.npy", "x.safetensors"]);
    }

    #[test]
    fn round_trips() {
        let folder = Folder::new();
        let data: Vec<f32> = (0..5000).map(|i| i as f32 * 0.37 - 900.0).collect();
        let as_f16: Vec<f32> = data.iter().map(|&x| f16::from_f32(x).to_f32()).collect();
        let as_bf16: Vec<f32> = data.iter().map(|&x| bf16::from_f32(x).to_f32()).collect();
        for name in ["x.npy", "x.safetensors:x", "X.NPY"] {
            for (file_type, expected) in [(FileType::F32, &data), (FileType::F16, &as_f16), (FileType::BF16, &as_bf16)]
            {
                let spec = folder.path(name);
                write(&spec, &[50, 100], &data, file_type).unwrap();
                let tensor = read(&spec).unwrap();
                assert_eq!((tensor.shape.as_slice(), &tensor.source), (&[50, 100][..], &spec));
                assert_eq!(tensor.floats().unwrap(), expected);
            }
        }
        for (shape, data) in [(&[][..], &[7.0][..]), (&[0], &[]), (&[3, 0], &[])] {
            for name in ["y.npy", "y.safetensors:y"] {
                write(&folder.path(name), shape, data, FileType::F32).unwrap();
                let tensor = read(&folder.path(name)).unwrap();
                assert_eq!((tensor.shape.as_slice(), tensor.floats().unwrap()), (shape, data));
            }
        }
    }

    #[test]
    fn keeps_other_tensors_and_metadata() {
        let folder = Folder::new();
        let header = r#"{"__metadata__":{"b":"ü","a":"1"},
            "mask":{"dtype":"BOOL","shape":[3],"data_offsets":[0,3]},
            "small":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[3,4]},
            "q":{"dtype":"F64","shape":[1],"data_offsets":[4,12]}}"#;
        let mut data = vec![1, 0, 1, 42];
        data.extend(2.5f64.to_le_bytes());
        let path = folder.file("x.safetensors", &safetensors(header, &data));

        write(&format!("{path}:out"), &[2], &[1.0, 2.0], FileType::F32).unwrap();
        write(&format!("{path}:out"), &[1], &[3.0], FileType::F16).unwrap();
        let first = fs::read(&path).unwrap();
        write(&format!("{path}:out"), &[1], &[3.0], FileType::F16).unwrap();
        assert_eq!(fs::read(&path).unwrap(), first);

        let all = safetensors::SafeTensors::deserialize(&first).unwrap();
        assert_eq!(all.len(), 4);
        assert_eq!(all.tensor("small").unwrap().data(), [42]);
        let (_, metadata) = safetensors::SafeTensors::read_metadata(&first).unwrap();
        let metadata = metadata.metadata().clone().unwrap();
        assert_eq!((metadata["a"].as_str(), metadata["b"].as_str()), ("1", "ü"));
        assert_eq!(read(&format!("{path}:mask")).unwrap().bools().unwrap(), [true, false, true]);
        assert_eq!(read(&format!("{path}:q")).unwrap().floats().unwrap(), [2.5]);
        assert_eq!(read(&format!("{path}:out")).unwrap().floats().unwrap(), [3.0]);
        assert_refused(&format!("{path}:small"), "F8_E4M3");
        assert_refused(&format!("{path}:none"), "it holds mask, out, q, small");
        assert_refused(&path, "4 tensors");
    }

    #[test]
    fn reads_the_only_tensor_and_lists_many() {
        let folder = Folder::new();
        write(&folder.path("x.safetensors:t0"), &[1], &[5.0], FileType::F32).unwrap();
        let path = folder.path("x.safetensors");
        assert_eq!(read(&path).unwrap().floats().unwrap(), [5.0]);
        for i in 1..30 {
            write(&format!("{path}:t{i}"), &[1], &[5.0], FileType::BF16).unwrap();
        }
        assert_refused(&path, "and 10 more");
        assert_refused(&format!("{path}:"), "missing after the colon");
    }

    #[test]
    fn colons_in_paths() {
        let parts = |spec: &str| match Place::parse(spec).unwrap() {
            Place::Npy(path) => (path, None),
            Place::Safetensors(path, name) => (path, name),
        };
        assert_eq!(parts("C:\\x.npy"), ("C:\\x.npy".into(), None));
        assert_eq!(parts("C:\\x.safetensors"), ("C:\\x.safetensors".into(), None));
        assert_eq!(parts("C:\\x.safetensors:q"), ("C:\\x.safetensors".into(), Some("q".into())));
        assert_eq!(parts("run:1/x.npy"), ("run:1/x.npy".into(), None));
        assert_eq!(parts("a:b.safetensors:c:d"), ("a:b.safetensors".into(), Some("c:d".into())));
        assert_eq!(parts("M.SafeTensors:x.npy"), ("M.SafeTensors".into(), Some("x.npy".into())));
        assert_eq!(parts("é.safetensors:ü"), ("é.safetensors".into(), Some("ü".into())));
        for spec in ["", ":", "x", "x.npz", "x.npy:q", "x.safetensors:"] {
            assert!(Place::parse(spec).is_err(), "{spec}");
        }
    }

    #[test]
    fn types_are_checked_on_use() {
        let folder = Folder::new();
        let ints = read(&folder.file("i.npy", &npy_of("|u1", false, "(2,)", &[0, 2]))).unwrap();
        assert!(ints.floats().unwrap_err().to_string().contains("holds u8"));
        assert!(ints.bools().unwrap_err().to_string().contains("it holds 2"));
        let mask = read(&folder.file("m.npy", &npy_of("|u1", false, "(2,)", &[0, 1]))).unwrap();
        assert_eq!(mask.bools().unwrap(), [false, true]);
        let floats = read(&folder.file("f.npy", &npy_of("<f2", false, "(1,)", &[0, 1]))).unwrap();
        assert!(floats.ints().is_err() && floats.bools().is_err());
    }

    #[test]
    fn refuses_hostile_npy_files() {
        let folder = Folder::new();
        let plain = |descr, shape| npy_of(descr, false, shape, &[0; 24]);
        let header = |text: &str| npy(2, text, &[0; 24]);
        let mut long = plain("<f4", "(6,)");
        long[6..12].copy_from_slice(&[2, 0, 0xff, 0xff, 0xff, 0xff]);
        let mut version = plain("<f4", "(6,)");
        version[6] = 9;
        let mut not_text = plain("<f4", "(6,)");
        not_text[20] = 0xff;
        let cases = [
            (vec![], "is empty"),
            (b"PK\x03\x04 a zip file".to_vec(), "not a .npy file"),
            (long, "claims 4294967295 bytes"),
            (version, "9.0"),
            (not_text, "not text"),
            (plain("<f4", "(1152921504606846976,)"), "but 24 follow"),
            (plain("<f4", "(1099511627776,)"), "but 24 follow"),
            (plain("<f4", "(4294967296, 4294967296, 4294967296)"), "larger than any memory"),
            (plain("<f4", "(0, 4294967296, 4294967296)"), "larger than any memory"),
            (plain("<f4", "(99999999999999999999,)"), "not made of lengths"),
            (plain("<f4", "(-6,)"), "not made of lengths"),
            (plain("<f4", "(6.0,)"), "expected )"),
            (plain("<f4", "6"), "expected ("),
            (plain("<f4", &format!("({})", "1,".repeat(65))), "more than 64 axes"),
            (plain("<f4", "(5,)"), "in 20 bytes, but 24 follow"),
            (plain("<f4", "(7,)"), "in 28 bytes, but 24 follow"),
            (plain("<c8", "(3,)"), "dtype <c8"),
            (plain("<f16", "(1,)"), "dtype <f16"),
            (plain("<U3", "(2,)"), "dtype <U3"),
            (plain("<M8[ns]", "(3,)"), "dtype <M8[ns]"),
            (plain("", "(6,)"), "dtype ;"),
            (plain("é4", "(6,)"), "dtype é4"),
            (plain("|V2", "(12,)"), "bfloat16"),
            (plain("|O", "(3,)"), "Python objects"),
            (plain("\x1b[31m\n", "(3,)"), "dtype ?[31m?"),
            (header("{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (6,)}"), "records"),
            (header("{'descr': '<f4', 'shape': (6,)}"), "does not say fortran_order"),
            (header("{'descr': '<f4', 'fortran_order': 1, 'shape': (6,)}"), "expected False"),
            (header("{'descr': '<f4', 'extra': 1}"), "unknown key extra"),
            (header("{'descr': '<f4"), "quote is not closed"),
            (header("{}"), "does not say descr"),
            (header("{} {}"), "damaged"),
            (header(""), "expected {"),
            (header(&"{".repeat(9999)), "expected '"),
            (header(&"(".repeat(9999)), "expected {"),
        ];
        for (bytes, expected) in cases {
            assert_refused(&folder.file("x.npy", &bytes), expected);
        }
        let large = npy_of("<u8", false, "(1,)", &u64::MAX.to_le_bytes());
        assert_refused(&folder.file("x.npy", &large), "18446744073709551615");
    }

    #[test]
    fn refuses_hostile_safetensors_files() {
        let folder = Folder::new();
        let one = |entry: &str| safetensors(&format!("{{\"x\":{entry}}}"), &[0; 8]);
        let mut not_text = one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#);
        not_text[10] = 0xff;
        let cases = [
            (vec![], "is empty"),
            (vec![1, 2, 3], "it has only 3 bytes"),
            (u64::MAX.to_le_bytes().to_vec(), "at most 0 are possible"),
            ([&[0xff; 8][..], &[b'{'; 1000]].concat(), "at most 1000 are possible"),
            (not_text, "header says"),
            (safetensors("", b"12345678"), "header says"),
            (safetensors(&"[".repeat(100_000), b""), "header says"),
            (safetensors("{}", b""), "holds no tensor"),
            (safetensors("{}", b"1"), "but 1 follow"),
            (one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,9]}"#), "header says"),
            (one(r#"{"dtype":"F32","shape":[2],"data_offsets":[8,0]}"#), "header says"),
            (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,4]}"#), "but 8 follow"),
            (one(r#"{"dtype":"F32","shape":[3],"data_offsets":[0,12]}"#), "but 8 follow"),
            (one(r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,8]}"#), "header says"),
            (one(r#"{"dtype":"F99\u001b\n","shape":[2],"data_offsets":[0,8]}"#), "F99??"),
            (one(r#"{"dtype":"C64","shape":[1],"data_offsets":[0,8]}"#), "holds C64"),
            (one(r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}"#), "header says"),
            (
                safetensors(r#"{"x":{"dtype":"U8","shape":[0,4294967296,4294967296],"data_offsets":[0,0]}}"#, b""),
                "larger than any memory",
            ),
        ];
        for (bytes, expected) in cases {
            let path = folder.file("x.safetensors", &bytes);
            assert_refused(&path, expected);
            let spec = format!("{path}:y");
            assert!(read(&spec).is_err());
            if expected.contains("header says") || expected.contains("follow") {
                assert!(write(&spec, &[1], &[1.0], FileType::F32).is_err());
                assert_eq!(fs::read(&path).unwrap(), bytes);
            }
        }
    }

    #[test]
    fn refuses_what_is_not_a_file() {
        let folder = Folder::new();
        fs::create_dir(folder.path("folder.npy")).unwrap();
        fs::create_dir(folder.path("folder.safetensors")).unwrap();
        for name in ["folder.npy", "folder.safetensors", "folder.safetensors:x"] {
            assert_refused(&folder.path(name), "folder");
            assert!(write(&folder.path(name), &[1], &[1.0], FileType::F32).is_err());
        }
        assert_refused(&folder.path("none.npy"), "there is no file");
        assert_refused(&folder.path("none.safetensors:x"), "there is no file");
        #[cfg(unix)]
        for name in ["/dev/null", "/dev/zero"] {
            let link = folder.path(&format!("{}.npy", name.replace('/', "_")));
            std::os::unix::fs::symlink(name, &link).unwrap();
            assert_refused(&link, "not a regular file");
            assert!(write(&link, &[1], &[1.0], FileType::F32).is_err());
        }
    }

    #[test]
    fn failed_writes_leave_everything_as_it_was() {
        let folder = Folder::new();
        let old = folder.path("x.npy");
        write(&old, &[1], &[1.0], FileType::F32).unwrap();
        let before = fs::read(&old).unwrap();
        let large = [1.0, 70000.0];
        let message = |spec: &str, shape: &[usize], file_type| {
            write(&folder.path(spec), shape, &large, file_type).unwrap_err().to_string()
        };
        assert!(message("x.npy", &[2], FileType::F16).contains("70000 is too large for f16"));
        assert!(message("x.safetensors:x", &[2], FileType::F16).contains("too large"));
        assert!(message("x.npy", &[3], FileType::F32).contains("there are 2 values"));
        assert!(message("x.npy", &[usize::MAX, 2], FileType::F32).contains("shape"));
        assert!(message("x.npy", &[2], FileType::I32).contains("not i32"));
        assert!(message("none/x.npy", &[2], FileType::F32).contains("there is no folder"));
        assert!(message("x.safetensors", &[2], FileType::F32).contains("add a name"));
        assert!(message("x.safetensors:__metadata__", &[2], FileType::F32).contains("another"));
        assert!(message("x.txt", &[2], FileType::F32).contains("expected a path"));
        let mut permissions = fs::metadata(&old).unwrap().permissions();
        permissions.set_readonly(true);
        fs::set_permissions(&old, permissions).unwrap();
        assert!(message("x.npy", &[2], FileType::F32).contains("read-only"));
        assert_eq!(fs::read(&old).unwrap(), before);
        assert_eq!(folder.names(), ["x.npy"]);
    }

    #[test]
    fn writes_all_or_nothing() {
        let folder = Folder::new();
        let place = |name: &str| folder.path(name);
        let both = |first: &str, second: &str, value: f32| {
            let (shape, file_type) = (&[1][..], FileType::F16);
            write_all(&[
                Output { spec: &place(first), shape, data: &[1.0], file_type },
                Output { spec: &place(second), shape, data: &[value], file_type },
            ])
        };
        for (first, second) in [
            ("x.npy", "y.npy"),
            ("x.npy", "none/y.npy"),
            ("none/x.npy", "y.npy"),
            ("s.safetensors:x", "s.safetensors:y"),
            ("x.npy", "s.safetensors:y"),
        ] {
            assert!(both(first, second, 70000.0).is_err());
            assert!(folder.names().is_empty(), "{first} {second}");
        }
        for (first, second) in [("x.npy", "x.npy"), ("s.safetensors:x", "s.safetensors:x")] {
            assert!(both(first, second, 2.0).unwrap_err().to_string().contains("the same place"));
            assert!(folder.names().is_empty(), "{first} {second}");
        }
        both("s.safetensors:x", "s.safetensors:y", 2.0).unwrap();
        both("s.safetensors:y", "z.npy", 3.0).unwrap();
        assert_eq!(read(&place("s.safetensors:x")).unwrap().floats().unwrap(), [1.0]);
        assert_eq!(read(&place("s.safetensors:y")).unwrap().floats().unwrap(), [1.0]);
        assert_eq!(read(&place("z.npy")).unwrap().floats().unwrap(), [3.0]);
    }

    #[cfg(unix)]
    #[test]
    fn keeps_links_and_permissions() {
        use std::os::unix::fs::PermissionsExt;
        let folder = Folder::new();
        let (file, link) = (folder.path("x.npy"), folder.path("link.npy"));
        write(&file, &[1], &[1.0], FileType::F32).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink("x.npy", &link).unwrap();
        write(&link, &[1], &[2.0], FileType::F32).unwrap();
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(read(&file).unwrap().floats().unwrap(), [2.0]);
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
    }

    /// Small valid files of both formats, for damaging.
    fn samples(folder: &Folder) -> Vec<(&'static str, Vec<u8>)> {
        let data: Vec<u8> = (0..24).collect();
        write(&folder.path("s.safetensors:x"), &[2, 3], &[1.0; 6], FileType::F32).unwrap();
        write(&folder.path("s.safetensors:y"), &[2], &[1.0; 2], FileType::F16).unwrap();
        vec![
            ("x.npy", npy_of("<f4", false, "(2, 3)", &data)),
            ("x.npy", npy_of(">i2", true, "(2, 3, 2)", &data)),
            ("x.safetensors:x", fs::read(folder.path("s.safetensors")).unwrap()),
        ]
    }

    #[test]
    fn refuses_files_cut_at_any_byte_or_with_more_at_the_end() {
        let folder = Folder::new();
        for (name, bytes) in samples(&folder) {
            let spec = folder.path(name);
            let path = folder.path(name.trim_end_matches(":x"));
            for length in 0..bytes.len() {
                fs::write(&path, &bytes[..length]).unwrap();
                assert_refused(&spec, "cannot read");
            }
            fs::write(&path, [&bytes[..], &[0]].concat()).unwrap();
            assert_refused(&spec, "follow");
            fs::write(&path, &bytes).unwrap();
            assert!(read(&spec).is_ok());
        }
    }

    #[test]
    fn survives_flipped_bits() {
        let folder = Folder::new();
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = |below: usize| {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            (seed % below as u64) as usize
        };
        for (name, bytes) in samples(&folder) {
            let spec = folder.path(name);
            let path = folder.path(name.trim_end_matches(":x"));
            let check = |damaged: &[u8]| {
                fs::write(&path, damaged).unwrap();
                match read(&spec) {
                    Ok(tensor) => assert!(tensor.shape.iter().product::<usize>() <= bytes.len()),
                    Err(_) => assert_refused(&spec, "cannot read"),
                }
            };
            for bit in 0..bytes.len() * 8 {
                let mut damaged = bytes.clone();
                damaged[bit / 8] ^= 1 << (bit % 8);
                check(&damaged);
            }
            for _ in 0..2000 {
                let mut damaged = bytes.clone();
                for _ in 0..1 + random(4) {
                    damaged[random(bytes.len())] = random(256) as u8;
                }
                check(&damaged);
            }
        }
    }
}
