package console

import "github.com/tidings/tidings/tokens"

// The groups of the navigation, in their order.
const (
	groupSee    = "See"
	groupMend   = "Mend"
	groupManage = "Manage"
)

// allPages are the pages, in the navigation's order. The first has the path "".
func (c *Console) allPages() []*page {
	return []*page{
		{path: "", title: "Overview", key: "o", group: groupSee, live: true, data: c.overviewData},
		{path: "partitions", title: "Partitions", key: "p", group: groupSee, system: true, live: true, data: c.partitionsData},
		{path: "consumers", title: "Consumers", key: "c", group: groupSee, system: true, live: true, data: c.consumersData},
		{path: "kinds", title: "Kinds", key: "k", group: groupManage, data: c.kindsData},
		{path: "doctor", title: "Doctor", key: "d", group: groupSee, system: true, data: c.doctorData},
		{path: "tokens", title: "Tokens", key: "t", group: groupManage, role: tokens.RoleAdmin, data: c.tokensData},
		{path: "audit", title: "Audit log", key: "a", group: groupManage, data: c.auditData},
	}
}

// allActs are what pages let their readers do.
func (c *Console) allActs() []*act {
	return []*act{
		{name: "consumer.pause", label: "Pause", role: tokens.RoleAdmin, system: true, do: c.doPause,
			look: c.lookConsumer("The consumer takes no events until it is resumed. They wait on the stream, which keeps them for NATS_MAX_AGE.", "Its projection falls behind meanwhile.")},
		{name: "consumer.resume", label: "Resume", role: tokens.RoleAdmin, system: true, do: c.doResume, look: c.lookConsumer("The consumer continues where it stopped.")},
		{name: "consumer.verify", label: "Verify", role: tokens.RoleAdmin, system: true, do: c.doVerify,
			look: c.lookConsumer("Every row of the projection is compared with the truth, which reads both in full. Nothing is changed.")},
		{name: "token.create", label: "Create a token", role: tokens.RoleAdmin, look: c.lookTokenCreate, do: c.doTokenCreate},
		{name: "token.rotate", label: "Rotate", role: tokens.RoleAdmin, look: c.lookTokenRotate, do: c.doTokenRotate},
		{name: "token.revoke", label: "Revoke", role: tokens.RoleAdmin, danger: true, look: c.lookTokenRevoke, do: c.doTokenRevoke},
	}
}
