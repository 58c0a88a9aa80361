//! Where models look for external data.

use std::path::PathBuf;

/// Returns the folder for the external data of a model in memory: the working directory.
///
/// `None` if it cannot be opened: then only a model with external data fails. The root folder is
/// none either, as a service that runs there would lend a model every file.
pub fn working_folder() -> Option<PathBuf> {
    let folder = std::env::current_dir().and_then(|folder| folder.canonicalize()).ok();
    folder.filter(|folder| folder.parent().is_some())
}
