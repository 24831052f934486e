/* The names by which gcompat (glibc functions over musl) is recognised. */
const char *gnu_get_libc_version(void);
const char *gnu_get_libc_version(void) { return "2.36"; }
