package broker

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// The roles of principals. docs/security.md has the permissions of each.
const (
	Relay      = "relay"
	API        = "api"
	Consumer   = "consumer"   // also the archiver
	Serve      = "serve"      // tidings serve: what relay, api and consumer may do together
	Operator   = "operator"   // the commands
	Subscriber = "subscriber" // a program outside Tidings
)

// Roles returns all roles.
func Roles() []string { return []string{Relay, API, Consumer, Serve, Operator, Subscriber} }

// MainAccount has the streams. Its users can destroy them, so they are only the relay, serve, which
// contains a relay, and the operator. NATS does not check where a request wants its answer, and the
// server takes an answer that comes as a request for a request. So permissions within one account
// are no boundary. Each other principal has another account, which imports what the principal
// needs: an import replaces the subject of the answer.
const MainAccount = "TIDINGS"

// Principal is a login to NATS with its own permissions.
type Principal struct {
	Role    string
	Name    string // of a subscriber, unique in its tenant; otherwise a program's, such as threadcache, or "" for the role
	Tenant  int64  // of a subscriber: it gets only this tenant's events; 0 for all
	Durable bool   // of a subscriber: it reads the streams through durable consumers (DurableName)
	Filter  string // of a subscriber: KIND.EVENT or KIND.*, the only events that it gets; "" for all
}

var (
	principalName = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]{0,63}$`)
	tenantName    = regexp.MustCompile(`^t[0-9]+_`)
	eventFilter   = regexp.MustCompile(`^[a-z][a-z0-9_]*\.([a-z][a-z0-9_]*|\*)$`)
)

// reservedNames are names that a subscriber may not have: those of our roles and programs.
var reservedNames = append(Roles(), "tidings", "console", "projector", "archiver", "followercounts", "threadcache", "migrate", "verify",
	"owner", "admin", "sys")

// Validate reports each invalid field.
func (p Principal) Validate() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if !slices.Contains(Roles(), p.Role) {
		bad("the role is %q: want one of %s", p.Role, strings.Join(Roles(), ", "))
	}
	if p.Role != Subscriber {
		if p.Tenant != 0 || p.Durable || p.Filter != "" {
			bad("only a %s has a tenant, a durable consumer or a filter, and %s is not one", Subscriber, p.Role)
		}
		if p.Name != "" && !slices.Contains(reservedNames, p.Name) {
			bad("the name is %q: want that of a program of Tidings, or none", p.Name)
		}
		return errors.Join(errs...)
	}
	switch {
	case p.Name == "":
		bad("a %s needs a name", Subscriber)
	case !principalName.MatchString(p.Name):
		bad("the name is %q: want 1 to 64 letters, digits, - and _, beginning with a letter", p.Name)
	case slices.Contains(reservedNames, strings.ToLower(p.Name)):
		bad("the name %s belongs to a part of Tidings", p.Name)
	case tenantName.MatchString(p.Name):
		bad("the name is %q: names that begin with t, a number and _ are made from a tenant and a name", p.Name)
	}
	if p.Tenant < 0 {
		bad("the tenant is %d: want 1 or more", p.Tenant)
	}
	if p.Filter != "" && !eventFilter.MatchString(p.Filter) {
		bad("the filter is %q: want KIND.EVENT or KIND.*", p.Filter)
	}
	return errors.Join(errs...)
}

// Complete returns our own principals and the subscribers. It returns an error for each invalid
// one, and for two that would share a login, a password or a durable consumer.
func Complete(subscribers []Principal) ([]Principal, error) {
	all := append([]Principal{{Role: Relay}, {Role: API}, {Role: Consumer}, {Role: Serve}, {Role: Operator}}, subscribers...)
	var errs []error
	logins, durables := make(map[string]bool), make(map[string]bool)
	for _, p := range all {
		if err := p.Validate(); err != nil {
			errs = append(errs, err)
			continue
		}
		if logins[p.Variable()] {
			errs = append(errs, fmt.Errorf("two logins have the name %s", p.Login()))
		}
		if d := p.DurableName(); d != "" && durables[d] {
			errs = append(errs, fmt.Errorf("two subscribers have the durable consumer %s", d))
		}
		logins[p.Variable()], durables[p.DurableName()] = true, true
	}
	return all, errors.Join(errs...)
}

// Login returns the name of p's user: its name, or that of its role. t7_ before it is for tenant 7.
func (p Principal) Login() string {
	switch {
	case p.Name == "":
		return p.Role
	case p.Tenant > 0:
		return TenantName(p.Tenant, p.Name)
	}
	return p.Name
}

// TenantName returns the name that a tenant's subscriber has in NATS: of its login, and of its
// durable consumers.
func TenantName(tenant int64, name string) string { return fmt.Sprintf("t%d_%s", tenant, name) }

// DurableName returns the name of p's durable consumer on each stream, or "". For a subscriber of
// all tenants it is the one that package subscribe uses.
func (p Principal) DurableName() string {
	switch {
	case !p.Durable:
		return ""
	case p.Tenant > 0 || p.Filter == "":
		return p.Login()
	}
	kind, of, _ := strings.Cut(p.Filter, ".")
	return HandlerName(p.Name, kind, of)
}

// HandlerName returns the name of the durable consumers of package subscribe: NAME-KIND-EVENT, or
// NAME-KIND for all events of a kind.
func HandlerName(name, kind, of string) string {
	if of == "*" {
		return name + "-" + kind
	}
	return name + "-" + kind + "-" + of
}

// InboxPrefix returns the prefix of the replies to p's requests. With a common prefix each login
// could read all replies.
func (p Principal) InboxPrefix() string { return "_INBOX_" + p.Login() }

// Account returns the name of p's account. The subscribers of a tenant share one.
func (p Principal) Account() string {
	switch {
	case p.Role == Relay || p.Role == Serve || p.Role == Operator:
		return MainAccount
	case p.Role != Subscriber:
		return strings.ToUpper(p.Role)
	case p.Tenant > 0:
		return fmt.Sprintf("TENANT_%d", p.Tenant)
	}
	return "SUBSCRIBER_" + p.Name
}

// Permissions returns the subjects that p may publish and subscribe to; all others are denied.
// Stream names are wildcards, because a resize creates streams with new numbers. So the streams
// need an account without other streams.
func (p Principal) Permissions(c Config) (publish, subscribe []string) {
	publish, subscribe = p.uses(c)
	if len(publish) > 0 {
		subscribe = append(subscribe, p.InboxPrefix()+".>")
	}
	return publish, subscribe
}

// uses returns what p sends and what it hears, except for its inbox.
func (p Principal) uses(c Config) (sends, hears []string) {
	switch p.Role {
	case Relay:
		sends = append(api("INFO", "STREAM.INFO.*", "STREAM.MSG.GET.*", "CONSUMER.LIST.*", "CONSUMER.INFO.*.*"),
			c.Prefix+".>")
		if c.LiveObjects {
			sends = append(sends, c.LivePrefix+".*.*.*.*")
		}
		if !c.Unmanaged {
			sends = append(sends, api("STREAM.CREATE.*", "STREAM.UPDATE.*", "CONSUMER.CREATE.*.*.>")...)
		}
		return sends, []string{WakeSubject}
	case Serve:
		for _, part := range []string{Relay, API, Consumer} {
			s, h := Principal{Role: part}.uses(c)
			sends, hears = append(sends, s...), append(hears, h...)
		}
		return once(sends), once(hears)
	case API:
		return append(api("INFO", "STREAM.NAMES", "STREAM.INFO.*", "CONSUMER.LIST.*"), WakeSubject),
			[]string{c.liveEvents()}
	case Consumer:
		return api("INFO", "STREAM.NAMES", "STREAM.INFO.*", "STREAM.MSG.GET.*", "CONSUMER.CREATE.*.*", "CONSUMER.MSG.NEXT.*.*",
			"CONSUMER.DELETE.*.*"), nil
	case Operator:
		return []string{"$JS.API.>", "$JS.ACK.>", c.Prefix + ".>", "$KV." + c.erasedBucket() + ".>", c.DeadStream() + ".>", WakeSubject},
			[]string{c.LivePrefix + ".>"}
	}
	hears = []string{c.LivePrefix + "." + p.events()}
	if c.LiveObjects && p.Filter != "" {
		hears = append(hears, hears[0]+".*")
	}
	durable := p.DurableName()
	if durable == "" {
		return nil, hears
	}
	// An acknowledgment has 9 parts, or at least 11 in the second form, which servers from 2.14 on
	// may use. The numbers of parts are exact: with one pattern for both, another consumer's
	// acknowledgment could have the name in a later part.
	sends = append(api("INFO", "STREAM.NAMES", "CONSUMER.INFO.*."+durable, "CONSUMER.MSG.NEXT.*."+durable),
		"$JS.ACK.*."+durable+".*.*.*.*.*", "$JS.ACK.*.*.*."+durable+".*.*.*.*.>", c.DeadStream()+".letter."+durable)
	if p.Tenant == 0 { // package subscribe reads the ends of streams; a message may be any tenant's
		sends = append(sends, api("STREAM.INFO.*", "STREAM.MSG.GET.*")...)
	}
	return sends, hears
}

// once returns each subject once, in the order of the first.
func once(subjects []string) (all []string) {
	for _, s := range subjects {
		if !slices.Contains(all, s) {
			all = append(all, s)
		}
	}
	return all
}

// events returns the end of the subjects of the events that a subscriber gets.
func (p Principal) events() string {
	tenant, filter := "*", ">"
	if p.Tenant > 0 {
		tenant = fmt.Sprintf("t%d", p.Tenant)
	}
	if p.Filter != "" {
		filter = p.Filter
	}
	return tenant + "." + filter
}

// DeadStream returns the name of the stream of subscribers' dead letters.
func (c Config) DeadStream() string { return c.Stream + "-dead" }

func api(verbs ...string) (subjects []string) {
	for _, v := range verbs {
		subjects = append(subjects, "$JS.API."+v)
	}
	return subjects
}
