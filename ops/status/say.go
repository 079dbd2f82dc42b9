package status

import (
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/outbox"
)

// NewUnavailable describes a server that does not answer. urls are its addresses, separated by
// commas; the result has them without passwords.
func NewUnavailable(server, urls string, err error) Unavailable {
	return Unavailable{Server: server, URL: withoutPassword(urls), Error: err.Error()}
}

// String returns the server, its addresses and the error on one line.
func (a Unavailable) String() string {
	return fmt.Sprintf("%s is unavailable (%s): %s", a.Server, a.URL, strings.Join(strings.Fields(a.Error), " "))
}

// withoutPassword returns the URLs without users, passwords and query parameters.
func withoutPassword(urls string) string {
	var all []string
	for one := range strings.SplitSeq(urls, ",") {
		u, err := url.Parse(strings.TrimSpace(one))
		if err != nil || u.Host == "" {
			return "its address is not a URL; hidden, because it may contain a password"
		}
		u.User, u.RawQuery = nil, ""
		all = append(all, u.String())
	}
	return strings.Join(all, ",")
}

// Missing returns a line for each server that is unavailable, and for each part that a lock made
// unreadable.
func (st State) Missing() (all []string) {
	for _, a := range st.Unavailable {
		all = append(all, a.String())
	}
	for _, u := range st.Unread {
		all = append(all, u.String())
	}
	return all
}

// Lagging returns a line for each reason why an event may not have arrived yet. It is empty when
// every event has arrived everywhere, except for the parts in Stopped.
func (st State) Lagging() []string {
	all := st.Missing()
	if st.Outbox != nil && st.Outbox.Pending > 0 {
		all = append(all, pending(*st.Outbox))
	}
	for _, p := range st.Partitions {
		if p.NoLeader != "" {
			all = append(all, fmt.Sprintf("partition %d: %s", p.Partition, p.NoLeader))
		}
		if p.Trouble != "" {
			all = append(all, fmt.Sprintf("partition %d: %s", p.Partition, p.Trouble))
		}
	}
	for _, c := range st.Consumers {
		if c.Unknown != "" {
			all = append(all, c.Consumer+": "+c.Unknown)
		}
		if c.Messages > int64(len(c.Lost)) { // a lost stream counts as one message
			line := fmt.Sprintf("%s: %s behind", c.Consumer, words.Of(c.Messages, "message"))
			if c.Paused != nil {
				line += ", and paused"
			}
			all = append(all, line)
		}
	}
	return all
}

// Stopped returns a line for each partition whose stream the relays refuse, and for each consumer
// with lost events. They wait for an operator.
func (st State) Stopped() (all []string) {
	for _, p := range st.Partitions {
		if p.Refused != "" {
			all = append(all, fmt.Sprintf("partition %d: %s", p.Partition, p.Refused))
		}
	}
	for _, c := range st.Consumers {
		if len(c.Lost) > 0 {
			all = append(all, fmt.Sprintf("%s: events of %s are missing; run `%s`", c.Consumer, strings.Join(c.Lost, ", "), st.Remedy(c)))
		}
	}
	return all
}

// pending describes the messages that are not published, and why they wait.
func pending(o outbox.Stats) string {
	noun := "messages are"
	if o.Pending == 1 {
		noun = "message is"
	}
	line := fmt.Sprintf("outbox: %s %s not published", words.Capped(int64(o.Pending), o.PendingMax), noun)
	var waits []string
	if o.Retrying > 0 {
		waits = append(waits, words.Count(int64(o.Retrying))+" failed and will be retried")
	}
	if n := o.Delayed - o.Retrying; n > 0 {
		waits = append(waits, words.Count(int64(n))+" delayed by the writer or behind another message")
	}
	them := "them"
	if o.Pending == 1 {
		them = "it"
	}
	if len(waits) > 0 {
		line += "; " + strings.Join(waits, " and ") + ": `tidings outbox list` shows " + them
	}
	return line
}

// DeadLetters returns a line for each queue of dead letters that is not empty. They wait for an
// operator.
func (st State) DeadLetters() []string {
	var all []string
	if st.Outbox != nil && st.Outbox.DLQDepth > 0 {
		all = append(all, fmt.Sprintf("outbox: %s in the DLQ", words.Of(int64(st.Outbox.DLQDepth), "message")))
	}
	for _, c := range st.Consumers {
		if c.DeadLetters > 0 {
			all = append(all, fmt.Sprintf("%s: %s", c.Consumer, words.Of(c.DeadLetters, "dead letter")))
		}
	}
	return all
}

// Remedy returns the next command for a consumer with lost events. A stream that the relays refuse
// is repaired first, because a repair gives most consumers all events back. The dry run shows what
// a repair would do.
func (st State) Remedy(c Consumer) string {
	if slices.ContainsFunc(st.Partitions, func(p Partition) bool { return p.Condition() == Refused && slices.Contains(c.Lost, p.Stream) }) {
		return "tidings repair stream --dry-run"
	}
	return "tidings replay --consumer " + c.Consumer
}
