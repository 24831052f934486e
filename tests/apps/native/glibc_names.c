/* What a layer with glibc's functions over musl has (gcompat). */
const char *gnu_get_libc_version(void);
const char *gnu_get_libc_version(void) { return "2.36"; }
