//! Writes the generated pages of `docs/`.

use std::path::Path;

fn main() -> std::io::Result<()> {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    for page in fsocket_hooktable::pages::all() {
        std::fs::write(docs.join(page.file), page.text)?;
        println!("docs/{}", page.file);
    }
    Ok(())
}
