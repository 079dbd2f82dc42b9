package status

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/tidings/tidings/internal/words"
	"github.com/tidings/tidings/outbox"
)

// NewAway describes a server that does not answer. urls are where it is, separated by commas; their passwords are left out.
func NewAway(server, urls string, err error) Away {
	return Away{Server: server, URL: withoutPassword(urls), Error: err.Error()}
}

// String says it on one line.
func (a Away) String() string {
	return fmt.Sprintf("%s is unavailable (%s): %s", a.Server, a.URL, strings.Join(strings.Fields(a.Error), " "))
}

// withoutPassword writes where servers are, without how to log in.
func withoutPassword(urls string) string {
	var all []string
	for one := range strings.SplitSeq(urls, ",") {
		u, err := url.Parse(strings.TrimSpace(one))
		if err != nil || u.Host == "" {
			return "its address is not a URL, and may have a password"
		}
		u.User, u.RawQuery = nil, ""
		all = append(all, u.String())
	}
	return strings.Join(all, ",")
}

// Lagging says what has not arrived everywhere yet; empty when everything has.
func (st State) Lagging() []string {
	var all []string
	for _, a := range st.Away {
		all = append(all, a.String())
	}
	if st.Outbox != nil && st.Outbox.Pending > 0 {
		all = append(all, pending(*st.Outbox))
	}
	for _, p := range st.Partitions {
		if p.Refused+p.NoLeader != "" {
			all = append(all, fmt.Sprintf("partition %d: %s", p.Partition, p.Refused+p.NoLeader))
		}
	}
	for _, c := range st.Consumers {
		if c.Unknown != "" {
			all = append(all, c.Consumer+": "+c.Unknown)
		}
		if c.Messages > 0 {
			line := fmt.Sprintf("%s: %s behind", c.Consumer, words.Of(c.Messages, "message"))
			if c.Paused != nil {
				line += ", and paused"
			}
			all = append(all, line)
		}
	}
	return all
}

// pending says what is not published, and what it waits for.
func pending(o outbox.Stats) string {
	noun := "messages are"
	if o.Pending == 1 {
		noun = "message is"
	}
	line := fmt.Sprintf("outbox: %s %s not published", words.Capped(int64(o.Pending), o.PendingMax), noun)
	var waits []string
	if o.Retrying > 0 {
		waits = append(waits, words.Count(int64(o.Retrying))+" of them after a failure, until the next attempt")
	}
	if n := o.Delayed - o.Retrying; n > 0 {
		waits = append(waits, words.Count(int64(n))+" of them for a time that its writer asked for, or behind another one")
	}
	if len(waits) > 0 {
		line += "; " + strings.Join(waits, " and ") + ": `tidings outbox list` shows them"
	}
	return line
}

// DeadLetters lists what waits for a person, apart from everything else.
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

// Notes says what needs attention, a line each.
func (st State) Notes() (notes []string) {
	note := func(format string, args ...any) { notes = append(notes, fmt.Sprintf(format, args...)) }
	for _, a := range st.Away {
		note("%s", a)
	}
	for _, b := range st.Blocked {
		note("Blocked: %s", b)
	}
	if st.Outbox != nil && st.Outbox.Retrying > 0 {
		note("%s failed and will be retried: `tidings outbox list` shows why and when.", words.Of(int64(st.Outbox.Retrying), "message"))
	}
	for _, p := range st.Partitions {
		switch {
		case p.Refused != "":
			note("Nothing is published to partition %d: %s", p.Partition, p.Refused)
		case p.NoLeader != "":
			note("Partition %d waits for a leader of its stream: %s", p.Partition, p.NoLeader)
		case p.State == Open && p.Replicas == 0 && p.Unknown == "":
			note("Partition %d has no stream yet: the first relay that holds it makes %s.", p.Partition, p.Stream)
		}
	}
	for _, u := range st.Unheld {
		if c := slices.IndexFunc(st.Consumers, func(c Consumer) bool { return c.Consumer == u.Kind }); c >= 0 && st.Consumers[c].Paused != nil {
			continue
		}
		noun := "partition"
		if len(u.Partitions) > 1 {
			noun = "partitions"
		}
		note("No running %s holds %s %s: start one, or look into its log.", u.Kind, noun, words.Ranges(u.Partitions))
	}
	for _, r := range st.Refusals {
		note("%s could not serve partition %d of %s, and does not take it back before %s: look into its log.", r.By, r.Partition, r.Kind, r.Until.Format(time.RFC3339))
	}
	for _, stream := range st.MoreOf {
		note("Stream %s has more external consumers than are listed.", stream)
	}
	if st.NotListed != "" {
		note("The external consumers are not known: %s", st.NotListed)
	}
	for _, c := range st.Consumers {
		if c.Unknown != "" && len(st.Away) == 0 {
			note("The lag of %s is not known: %s", c.Consumer, c.Unknown)
		}
		if len(c.Lost) > 0 {
			note("%s has lost events of %s: run `tidings replay --consumer %s`", c.Consumer, strings.Join(c.Lost, ", "), c.Consumer)
		}
	}
	return notes
}
