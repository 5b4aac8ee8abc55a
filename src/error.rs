//! The one error type.

/// Everything that can go wrong, as a value: bad input, a missing capability, an exceeded limit, a lost device.
///
/// Every message says what was expected, what came, and where it helps, what to do.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An argument does not fit the others or the rules in the docs.
    #[error("{what}: expected {expected}, got {given}")]
    Shape {
        /// The argument.
        what: String,
        /// What it should be.
        expected: String,
        /// What it is.
        given: String,
    },
    /// The adapter, or the device as it was requested, lacks something that the request needs.
    #[error("{op} is not possible here: {lacking}")]
    Unsupported {
        /// The operation or variant.
        op: String,
        /// What is missing.
        lacking: String,
    },
    /// A size exceeds a limit of the device or of this library.
    #[error("{what} is {value}, over the limit of {limit}: {hint}")]
    Limit {
        /// The size.
        what: String,
        /// The largest that is allowed.
        limit: u64,
        /// What was asked for.
        value: u64,
        /// What to do.
        hint: String,
    },
    /// A pool of KV pages has too few free ones; nothing was changed.
    #[error("{needed} pages are needed and {free} are free: free sequences, or make a pool of more pages")]
    OutOfPages {
        /// Pages that the request needs.
        needed: u32,
        /// Pages that are free or can be evicted.
        free: u32,
    },
    /// A shader was refused by the compiler or the driver; the place is in the source file, not in the linked text.
    #[error("{variant}: {file}:{line}: {message}")]
    Shader {
        /// The variant row.
        variant: String,
        /// The WGSL file.
        file: String,
        /// The line in it, from 1.
        line: u32,
        /// What the compiler said.
        message: String,
    },
    /// The device is gone; nothing computed after that can be trusted. Make a new device and a new [`Runtime`](crate::Runtime).
    #[error("the GPU device was lost ({0}): make a new device and a new Runtime")]
    DeviceLost(String),
    /// The device has no memory left for a buffer.
    #[error("out of GPU memory: {0}")]
    OutOfMemory(String),
    /// Another message of the GPU stack.
    #[error("GPU error: {0}")]
    Gpu(String),
}

/// [`std::result::Result`] with [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn shape(what: impl Into<String>, expected: impl Into<String>, given: impl ToString) -> Self {
        Error::Shape { what: what.into(), expected: expected.into(), given: given.to_string() }
    }

    pub(crate) fn limit(what: impl Into<String>, limit: u64, value: u64, hint: impl Into<String>) -> Self {
        Error::Limit { what: what.into(), limit, value, hint: hint.into() }
    }

    /// `Ok` if `value` is 1 to `max`.
    pub(crate) fn unless_in(what: &str, value: u32, max: u32) -> Result<()> {
        match value {
            0 => Err(Error::shape(what, format!("1 to {max}"), 0)),
            value if value > max => Err(Error::limit(what, max.into(), value.into(), "this library goes no further")),
            _ => Ok(()),
        }
    }

    pub(crate) fn unsupported(op: impl Into<String>, lacking: impl Into<String>) -> Self {
        Error::Unsupported { op: op.into(), lacking: lacking.into() }
    }
}

impl From<wgpu::Error> for Error {
    fn from(error: wgpu::Error) -> Self {
        match error {
            wgpu::Error::OutOfMemory { source } => Error::OutOfMemory(source.to_string()),
            other => Error::Gpu(other.to_string()),
        }
    }
}
