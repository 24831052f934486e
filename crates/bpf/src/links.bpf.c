/* Lists the network namespaces that have BPF programs attached to netfilter's hooks: for each
 * such program, the inode number of its namespace (u32). (A list of BPF links by id would need
 * CAP_SYS_ADMIN, and does not show the namespace.)
 */
#include "vmlinux.h"
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "GPL";

SEC("iter/bpf_link")
int netfilter(struct bpf_iter__bpf_link *ctx)
{
	struct bpf_link *link = ctx->link;
	__u32 inum;

	/* Linux before 6.4 has no such links. */
	if (!link || !bpf_core_type_exists(struct bpf_nf_link) || link->type != BPF_LINK_TYPE_NETFILTER)
		return 0;
	inum = BPF_CORE_READ((struct bpf_nf_link *)link, net, ns.inum);
	bpf_seq_write(ctx->meta->seq, &inum, sizeof(inum));
	return 0;
}
