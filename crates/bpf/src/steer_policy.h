/* For an operator's own policy: an object with one XDP program that ends with steer_to(). An
 * example is policies/by_address.bpf.c; docs/network.md says how to build and use it.
 *
 * The program runs for every whole TCP packet after parsing and classification, in place of the
 * built-in policies. It may have maps of its own. STEER_ABI is incremented when an older object
 * would misread the data that it gets.
 */
#ifndef FSOCKET_STEER_POLICY_H
#define FSOCKET_STEER_POLICY_H

#include "counters.h"
#include "steer.h"

#define STEER_ABI 1

/* The number of entries of this map is the version of the interface. The loader refuses an
 * object with another version than its own. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, STEER_ABI);
	__type(key, __u32);
	__type(value, __u32);
} steer_abi SEC(".maps");

static __always_inline struct steer_packet *steer_packet(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&packets, &zero);
}

#endif
