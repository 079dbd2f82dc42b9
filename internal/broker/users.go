package broker

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nkeys"
)

// share is a subject that the main account shares with another account.
type share struct {
	subject string
	hears   bool // the other account gets its messages; otherwise it sends requests there
}

// answersOften reports whether a request has more than one answer.
func (s share) answersOften() bool { return strings.HasPrefix(s.subject, "$JS.API.CONSUMER.MSG.NEXT.") }

// account is an account with its users.
type account struct {
	name  string
	users []Principal
	uses  []share // of the main account
}

// accounts returns the accounts of all, the main account first. An account that sends requests to
// $JS.API needs the import of $JS.API.INFO: without it the server would answer all of them itself,
// that the account has no JetStream.
func accounts(c Config, all []Principal) (list []account) {
	for _, p := range all {
		i := slices.IndexFunc(list, func(a account) bool { return a.name == p.Account() })
		if i < 0 {
			i = len(list)
			list = append(list, account{name: p.Account()})
		}
		a := &list[i]
		a.users = append(a.users, p)
		if a.name == MainAccount {
			continue
		}
		sends, hears := p.uses(c)
		for _, subject := range sends {
			a.uses = append(a.uses, share{subject: subject})
		}
		for _, subject := range hears {
			a.uses = append(a.uses, share{subject: subject, hears: true})
		}
	}
	for i := range list {
		list[i].uses = distinct(list[i].uses)
	}
	return list
}

// distinct returns each share once, and none that another one contains: an account would get such
// messages twice.
func distinct(all []share) (kept []share) {
	for _, s := range all {
		if !slices.ContainsFunc(all, func(o share) bool {
			return o.hears == s.hears && o.subject != s.subject && contains(o.subject, s.subject)
		}) &&
			!slices.Contains(kept, s) {
			kept = append(kept, s)
		}
	}
	return kept
}

// contains reports whether the pattern a matches everything that the pattern b matches.
func contains(a, b string) bool { return jwt.Subject(b).IsContainedIn(jwt.Subject(a)) }

// Users returns the part of a server's configuration that has the accounts, and the principals with
// their permissions. The server reads their passwords from its environment, NATS_PASSWORD_NAME:
// plain, or bcrypt hashes. all is of Complete.
func Users(c Config, all []Principal) string {
	list := accounts(c, all)
	var b strings.Builder
	b.WriteString("accounts {\n")
	for _, a := range list {
		fmt.Fprintf(&b, "  %s: {\n", a.name)
		if a.name == MainAccount {
			b.WriteString("    jetstream: enabled\n")
		}
		b.WriteString("    users: [\n")
		for _, p := range a.users {
			publish, subscribe := p.Permissions(c)
			fmt.Fprintf(&b, "      {user: %q, password: $%s, permissions: {\n        publish: %s\n        subscribe: %s\n      }}\n",
				p.Login(), p.Variable(), allow(publish), allow(subscribe))
		}
		b.WriteString("    ]\n")
		if a.name == MainAccount {
			b.WriteString("    exports: [\n" + exports(list) + "    ]\n")
		} else {
			b.WriteString("    imports: [\n")
			for _, s := range a.uses {
				fmt.Fprintf(&b, "      {%s: {account: %s, subject: %q}}\n", s.kind(), MainAccount, s.subject)
			}
			b.WriteString("    ]\n")
		}
		b.WriteString("  }\n")
	}
	b.WriteString("}\n")
	return b.String()
}

func (s share) kind() string {
	if s.hears {
		return "stream"
	}
	return "service"
}

// exports returns each subject that the main account shares, with the accounts that may import it.
func exports(list []account) string {
	var b strings.Builder
	var done []share
	for _, a := range list {
		for _, s := range a.uses {
			if slices.Contains(done, s) {
				continue
			}
			done = append(done, s)
			var who []string
			for _, o := range list {
				if slices.Contains(o.uses, s) {
					who = append(who, o.name)
				}
			}
			response := ""
			if s.answersOften() {
				response = ", response_type: stream"
			}
			fmt.Fprintf(&b, "      {%s: %q%s, accounts: [%s]}\n", s.kind(), s.subject, response, strings.Join(who, ", "))
		}
	}
	return b.String()
}

// Variable returns the name of p's password in the server's environment.
func (p Principal) Variable() string {
	return "NATS_PASSWORD_" + strings.ToUpper(strings.ReplaceAll(p.Login(), "-", "_"))
}

// allow writes a list of subjects. Without the special case, an empty list would allow everything.
func allow(subjects []string) string {
	if len(subjects) == 0 {
		return `{deny: [">"]}`
	}
	return fmt.Sprintf("{allow: [%s]}", `"`+strings.Join(subjects, `", "`)+`"`)
}

// The keys that belong to no principal's account.
const (
	OperatorKey = "operator" // signs the accounts
	SystemKey   = "SYS"      // the account of the servers themselves
)

// Keys are the seeds of the operator and of the accounts, by name, for servers that trust accounts
// which the operator has signed, and users whom an account has signed. All are secrets.
type Keys map[string]string

// Add creates the keys that k lacks for all, and returns their names.
func (k Keys) Add(all []Principal) (added []string, err error) {
	names := []string{OperatorKey, SystemKey}
	for _, p := range all {
		names = append(names, p.Account())
	}
	for _, name := range names {
		if k[name] != "" {
			continue
		}
		create := nkeys.CreateAccount
		if name == OperatorKey {
			create = nkeys.CreateOperator
		}
		pair, err := create()
		if err != nil {
			return nil, err
		}
		secret, err := pair.Seed()
		if err != nil {
			return nil, err
		}
		k[name] = string(secret)
		added = append(added, name)
	}
	return added, nil
}

// pair returns the key pair of that name.
func (k Keys) pair(name string) (nkeys.KeyPair, error) {
	pair, err := nkeys.FromSeed([]byte(strings.TrimSpace(k[name])))
	if err != nil {
		return nil, fmt.Errorf("read the seed of %s: %w", name, err)
	}
	if valid := nkeys.IsValidPublicAccountKey; name != OperatorKey && !valid(public(pair)) ||
		name == OperatorKey && !nkeys.IsValidPublicOperatorKey(public(pair)) {
		return nil, fmt.Errorf("the seed of %s belongs to a key of type %.1s", name, public(pair))
	}
	return pair, nil
}

// Server returns the part of the servers' configuration that trusts the accounts of all. all is of
// Complete, and k has their keys. The main account exports what any principal uses, and each import
// needs a token that the main account has signed for it. So another subscriber changes no account
// but its own. Servers that read the configuration close the connections of revoked users, and
// admit no new ones.
func (k Keys) Server(c Config, all []Principal, revoked ...Revocation) (string, error) {
	operator, err := k.pair(OperatorKey)
	if err != nil {
		return "", err
	}
	system, err := k.pair(SystemKey)
	if err != nil {
		return "", err
	}
	main, err := k.pair(MainAccount)
	if err != nil {
		return "", err
	}
	servers := jwt.NewAccountClaims(public(system))
	servers.Name = SystemKey
	claims := []*jwt.AccountClaims{servers}
	for _, a := range accounts(c, all) {
		pair, err := k.pair(a.name)
		if err != nil {
			return "", err
		}
		signed := jwt.NewAccountClaims(public(pair))
		signed.Name = a.name
		if a.name == MainAccount {
			signed.Limits.JetStreamLimits = jwt.JetStreamLimits{DiskStorage: jwt.NoLimit, MemoryStorage: jwt.NoLimit, Streams: jwt.NoLimit,
				Consumer: jwt.NoLimit}
			for _, s := range exported(c) {
				signed.Exports.Add(s.export())
			}
		}
		for _, s := range a.uses {
			i, err := s.imported(main, signed.Subject)
			if err != nil {
				return "", fmt.Errorf("sign an import of %s: %w", a.name, err)
			}
			signed.Imports.Add(i)
		}
		claims = append(claims, signed)
	}
	var b strings.Builder
	// Not the operator as a token: it has the time at which it was signed, and a server that
	// reloads refuses another one.
	fmt.Fprintf(&b, "trusted_keys: [%s]\nsystem_account: %s\nresolver: MEMORY\nresolver_preload: {\n", public(operator), public(system))
	for _, a := range claims {
		for _, r := range revoked {
			if r.Account == "" || r.Account == a.Subject {
				a.RevokeAt(r.Key, r.At)
			}
		}
		token, err := a.Encode(operator)
		if err != nil {
			return "", fmt.Errorf("sign the account %s: %w", a.Name, err)
		}
		fmt.Fprintf(&b, "  # %s\n  %s: %s\n", a.Name, a.Subject, token)
	}
	b.WriteString("}\n")
	return b.String(), nil
}

// exported are the subjects of which each account may get a part.
func exported(c Config) (all []share) {
	for _, subject := range append(api("INFO", "STREAM.NAMES", "STREAM.INFO.*", "STREAM.MSG.GET.*", "CONSUMER.CREATE.*.*",
		"CONSUMER.LIST.*", "CONSUMER.DELETE.*.*", "CONSUMER.INFO.*.*",
		"CONSUMER.MSG.NEXT.*.*"), "$JS.ACK.>", c.DeadStream()+".letter.*", WakeSubject) {
		all = append(all, share{subject: subject})
	}
	return append(all, share{subject: c.LivePrefix + ".>", hears: true})
}

func (s share) exportType() jwt.ExportType {
	if s.hears {
		return jwt.Stream
	}
	return jwt.Service
}

func (s share) export() *jwt.Export {
	e := &jwt.Export{Name: s.subject, Subject: jwt.Subject(s.subject), Type: s.exportType(), TokenReq: true}
	if s.answersOften() {
		e.ResponseType = jwt.ResponseTypeStream
	}
	return e
}

// imported returns the import of s into an account, with the token of the main account.
func (s share) imported(main nkeys.KeyPair, into string) (*jwt.Import, error) {
	a := jwt.NewActivationClaims(into)
	a.Name, a.ImportSubject, a.ImportType = s.subject, jwt.Subject(s.subject), s.exportType()
	token, err := a.Encode(main)
	return &jwt.Import{Name: s.subject, Subject: jwt.Subject(s.subject), Account: public(main), Type: s.exportType(), Token: token}, err
}

// public returns the public key. Every key pair has one.
func public(k nkeys.KeyPair) string {
	key, err := k.PublicKey()
	if err != nil {
		panic(err)
	}
	return key
}

// Credentials returns a credentials file (NATS_CREDENTIALS) for p, signed with the seed of its
// account. It expires after expires; 0 means never.
func (k Keys) Credentials(c Config, p Principal, expires time.Duration) ([]byte, error) {
	account, err := k.pair(p.Account())
	if err != nil {
		return nil, err
	}
	user, err := nkeys.CreateUser()
	if err != nil {
		return nil, err
	}
	claims := jwt.NewUserClaims(public(user))
	claims.Name = p.Login()
	if expires > 0 {
		claims.Expires = time.Now().Add(expires).Unix()
	}
	publish, subscribe := p.Permissions(c)
	claims.Pub.Allow.Add(publish...)
	claims.Sub.Allow.Add(subscribe...)
	if len(publish) == 0 { // an empty list would allow everything
		claims.Pub.Deny.Add(">")
	}
	if len(subscribe) == 0 {
		claims.Sub.Deny.Add(">")
	}
	token, err := claims.Encode(account)
	if err != nil {
		return nil, fmt.Errorf("sign the credentials of %s: %w", p.Login(), err)
	}
	secret, err := user.Seed()
	if err != nil {
		return nil, err
	}
	return jwt.FormatUserConfig(token, secret)
}
