//! Watching a cache while a model runs.

use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Contents, Phase, TraceInfo, TraceWriter};
use crate::error::{Error, Result};
use crate::whole_file::WholeFile;

/// The routing of one layer step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Routed<'a> {
    /// Layer ordinal: layers without experts do not count.
    pub layer: usize,
    /// Experts per token.
    pub top_k: usize,
    /// `[tokens, top_k]`, row-major, in the order of choice.
    pub choices: &'a [u32],
    /// Routing weights of `choices`, where they are known.
    pub weights: Option<&'a [f32]>,
    /// What the model guesses that its last token will choose in the next layer, likeliest first; empty without a guess.
    pub guess: &'a [u32],
}

/// Sees the routing of every layer step of a cache; see [`ExpertCache::observe`](crate::ExpertCache::observe).
pub trait RoutingObserver: Send {
    /// A layer is about to run. Called in the order of the steps, before the step itself.
    fn step(&mut self, step: &Routed<'_>);

    /// Whether guesses for the next layer are of interest, so that models compute them.
    fn wants_guesses(&self) -> bool {
        false
    }
}

impl<F: FnMut(&Routed<'_>) + Send> RoutingObserver for F {
    fn step(&mut self, step: &Routed<'_>) {
        self(step);
    }
}

/// Records a running model's routing to a file. A handle: clones write to the same file.
///
/// One goes to the cache as its observer, the other stays with the caller, who says where turns and phases begin and
/// calls [`Self::finish`]; until then there is no file of that name, or still the old one. One sequence at a time: tokens of several would be taken for one another's.
#[derive(Clone)]
pub struct Recorder {
    shared: Arc<Mutex<Shared>>,
    path: PathBuf,
    contents: Contents,
}

struct Shared {
    /// `None` once finished.
    writer: Option<TraceWriter<BufWriter<File>>>,
    whole: Option<WholeFile>,
    failed: Option<std::io::Error>,
}

impl Shared {
    /// Keeps the first failure for [`Recorder::finish`]: a model should not stop for its trace.
    fn with(&mut self, write: impl FnOnce(&mut TraceWriter<BufWriter<File>>) -> std::io::Result<()>) {
        if let Some(writer) = self.writer.as_mut().filter(|_| self.failed.is_none())
            && let Err(e) = write(writer)
        {
            self.failed = Some(e);
        }
    }
}

impl Recorder {
    /// Begins the file at `path`, for routing and `contents`.
    ///
    /// # Errors
    /// As [`WholeFile::create`].
    pub fn create(path: &Path, info: TraceInfo, contents: Contents) -> Result<Self> {
        let whole = WholeFile::create(path)?;
        let file = whole.file().try_clone();
        let writer = file.and_then(|f| TraceWriter::new(BufWriter::new(f), info, contents));
        let writer = Some(writer.map_err(|e| Error::io(path, e))?);
        let shared = Arc::new(Mutex::new(Shared { writer, whole: Some(whole), failed: None }));
        Ok(Self { shared, path: path.to_owned(), contents })
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What follows belongs to this turn and phase.
    pub fn begin(&self, turn: u32, phase: Phase) {
        self.shared().with(|w| w.begin(turn, phase));
    }

    /// Forgets all of the turn that was begun last; see [`TraceWriter::drop_turn`].
    pub fn drop_turn(&self) {
        self.shared().with(TraceWriter::drop_turn);
    }

    /// Ends the file and returns the number of tokens in it; without any there is none. Steps that come later are not
    /// recorded.
    ///
    /// # Errors
    /// [`Error::Io`] with the first write that failed, also of a step before.
    pub fn finish(&self) -> Result<u64> {
        let mut shared = self.shared();
        let done = match (shared.failed.take(), shared.writer.take()) {
            (Some(e), _) => Err(e),
            (None, Some(writer)) => writer.finish(),
            (None, None) => Ok(0),
        };
        let tokens = done.map_err(|e| Error::io(&self.path, e))?;
        match shared.whole.take() {
            Some(whole) if tokens > 0 => whole.replace()?,
            _ => {}
        }
        Ok(tokens)
    }
}

impl RoutingObserver for Recorder {
    fn step(&mut self, step: &Routed<'_>) {
        self.shared().with(|w| w.step(step));
    }

    fn wants_guesses(&self) -> bool {
        self.contents.guesses
    }
}
