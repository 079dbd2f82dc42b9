package broker

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/tidings/tidings/event"
)

// The roles of principals. docs/security.md has the permissions of each.
const (
	Relay      = "relay"
	API        = "api"
	Consumer   = "consumer"   // also the archiver
	Operator   = "operator"   // the commands
	Subscriber = "subscriber" // a program outside Tidings
)

// Roles returns all roles.
func Roles() []string { return []string{Relay, API, Consumer, Operator, Subscriber} }

// Principal is a login to NATS with its own permissions.
type Principal struct {
	Name    string // also the name of its inbox (InboxPrefix); "" for the role's name
	Role    string
	Tenant  int64  // of a subscriber: it gets only this tenant's events; 0 for all
	Durable string // of a subscriber: the durable consumer that it may create and read on each stream; "" for none
	Filter  string // of a subscriber: KIND.EVENT or KIND.*, the only events that it gets; "" for all
}

var (
	principalName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]{0,63}$`)
	eventFilter   = regexp.MustCompile(`^[a-z][a-z0-9_]*\.([a-z][a-z0-9_]*|\*)$`)
)

// Complete returns p with its name, or an error for each invalid field.
func (p Principal) Complete() (Principal, error) {
	if p.Name == "" {
		p.Name = p.Role
	}
	var errs []error
	if !slices.Contains(Roles(), p.Role) {
		errs = append(errs, fmt.Errorf("the role is %q: want one of %s", p.Role, strings.Join(Roles(), ", ")))
	}
	if !principalName.MatchString(p.Name) {
		errs = append(errs, fmt.Errorf("the name is %q: want 1 to 64 letters, digits, - and _, beginning with a letter", p.Name))
	}
	if p.Role != Subscriber && (p.Tenant != 0 || p.Durable != "" || p.Filter != "") {
		errs = append(errs, fmt.Errorf("only a %s has a tenant, a durable consumer or a filter, and %s is not one", Subscriber, p.Name))
	}
	if p.Tenant < 0 {
		errs = append(errs, fmt.Errorf("the tenant is %d: want 1 or more", p.Tenant))
	}
	if p.Durable != "" && !principalName.MatchString(p.Durable) {
		errs = append(errs, fmt.Errorf("the durable consumer is %q: want 1 to 64 letters, digits, - and _, beginning with a letter",
			p.Durable))
	}
	if p.Filter != "" && !eventFilter.MatchString(p.Filter) {
		errs = append(errs, fmt.Errorf("the filter is %q: want KIND.EVENT or KIND.*", p.Filter))
	}
	return p, errors.Join(errs...)
}

// InboxPrefix returns the prefix of the replies to p's requests. With a common prefix each login could read all
// replies.
func (p Principal) InboxPrefix() string { return "_INBOX_" + p.Name }

// Permissions returns the subjects that p may publish and subscribe to; all others are denied. Stream names are
// wildcards, because a resize creates streams with new numbers. So the streams need an account without other streams.
func (p Principal) Permissions(c Config) (publish, subscribe []string) {
	inbox := p.InboxPrefix() + ".>"
	switch p.Role {
	case Relay:
		return append(api("INFO", "STREAM.INFO.*", "STREAM.CREATE.*", "STREAM.UPDATE.*", "STREAM.MSG.GET.*"), c.Prefix+".>"),
			[]string{inbox, WakeSubject}
	case API:
		return append(api("STREAM.NAMES", "STREAM.INFO.*"), WakeSubject),
			[]string{inbox, c.LivePrefix + ".*." + event.AggregateFollow + ".*"}
	case Consumer:
		return api("INFO", "STREAM.NAMES", "STREAM.INFO.*", "STREAM.MSG.GET.*", "CONSUMER.CREATE.*.*", "CONSUMER.MSG.NEXT.*.*",
			"CONSUMER.DELETE.*.*"), []string{inbox}
	case Operator:
		return []string{"$JS.API.>", "$JS.ACK.>", c.Prefix + ".>", "$KV." + c.erasedBucket() + ".>", c.Stream + "-dead.>", WakeSubject},
			[]string{inbox, c.LivePrefix + ".>"}
	}
	tenant, filter := "*", ">"
	if p.Tenant > 0 {
		tenant = fmt.Sprintf("t%d", p.Tenant)
	}
	if p.Filter != "" {
		filter = p.Filter
	}
	subscribe = []string{c.LivePrefix + "." + tenant + "." + filter}
	if p.Durable == "" {
		return nil, subscribe
	}
	publish = api("STREAM.NAMES", "CONSUMER.INFO.*."+p.Durable, "CONSUMER.MSG.NEXT.*."+p.Durable,
		"CONSUMER.CREATE.*."+p.Durable+"."+c.Prefix+".*."+tenant+"."+filter)
	// servers from 2.14 on may use the second form
	publish = append(publish, "$JS.ACK.*."+p.Durable+".>", "$JS.ACK.*.*.*."+p.Durable+".>")
	if p.Tenant == 0 {
		publish = append(publish, p.handles(c)...)
	}
	return publish, append(subscribe, inbox)
}

// handles returns the additional permissions for package subscribe, which reads the ends of streams and keeps dead
// letters. They may allow reading a message of another tenant.
func (p Principal) handles(c Config) []string {
	dead := c.Stream + "-dead"
	return append(api("STREAM.INFO.*", "STREAM.MSG.GET.*", "STREAM.CREATE."+dead, "STREAM.MSG.DELETE."+dead,
		"CONSUMER.CREATE."+dead+"."+p.Durable+"."+dead+".retry."+p.Durable),
		dead+".letter."+p.Durable)
}

func api(verbs ...string) (subjects []string) {
	for _, v := range verbs {
		subjects = append(subjects, "$JS.API."+v)
	}
	return subjects
}
