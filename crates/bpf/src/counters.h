/* Counters of a program: one per-CPU array, one key a reason. The order is the
 * one of an enum in the same file; its Rust side repeats it by name. */
#ifndef FSOCKET_COUNTERS_H
#define FSOCKET_COUNTERS_H

#define COUNTERS(map, n)                                                                                     \
	struct {                                                                                             \
		__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);                                                     \
		__uint(max_entries, n);                                                                      \
		__type(key, __u32);                                                                          \
		__type(value, __u64);                                                                        \
	} map SEC(".maps")

/* Programs in process context can be preempted between lookup and addition,
 * hence the atomic; on the own CPU's line it costs little. */
#define COUNT(map, reason)                                                                                   \
	do {                                                                                                 \
		__u32 key_ = (reason);                                                                       \
		__u64 *value_ = bpf_map_lookup_elem(&map, &key_);                                            \
		if (value_)                                                                                  \
			__sync_fetch_and_add(value_, 1);                                                     \
	} while (0)

#endif
