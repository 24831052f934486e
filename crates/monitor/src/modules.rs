//! Parts of the kernel that could be modules. To ask one that is not loaded would load it.

use std::path::Path;

/// Whether this part is loaded, or built in.
pub fn is_there(module: &str) -> bool {
    Path::new("/sys/module").join(module).exists() || is_builtin(module)
}

/// Whether it is part of the kernel. Where there are no modules: yes, to ask loads none.
pub fn is_builtin(module: &str) -> bool {
    let release = rustix::system::uname();
    let builtin = Path::new("/lib/modules").join(release.release().to_string_lossy().as_ref()).join("modules.builtin");
    std::fs::read_to_string(builtin).map_or(true, |list| list.contains(&format!("/{module}.ko")))
}
