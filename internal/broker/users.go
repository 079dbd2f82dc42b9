package broker

import (
	"fmt"
	"strings"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nkeys"
)

// Users returns the part of a server's configuration that has the principals and their permissions. The server reads
// their passwords from its environment, NATS_PASSWORD_NAME: plain, or bcrypt hashes.
func Users(c Config, all []Principal) string {
	var b strings.Builder
	b.WriteString("authorization {\n  users: [\n")
	for _, p := range all {
		publish, subscribe := p.Permissions(c)
		fmt.Fprintf(&b, "    {user: %q, password: $%s, permissions: {\n      publish: %s\n      subscribe: %s\n    }}\n", p.Name,
			p.Variable(), allow(publish), allow(subscribe))
	}
	b.WriteString("  ]\n}\n")
	return b.String()
}

// Variable returns the name of p's password in the server's environment.
func (p Principal) Variable() string {
	return "NATS_PASSWORD_" + strings.ToUpper(strings.ReplaceAll(p.Name, "-", "_"))
}

// allow writes a list of subjects. Without the special case, an empty list would allow everything.
func allow(subjects []string) string {
	if len(subjects) == 0 {
		return `{deny: [">"]}`
	}
	return fmt.Sprintf("{allow: [%s]}", `"`+strings.Join(subjects, `", "`)+`"`)
}

// Account is an operator with one account, for servers that trust users whom the account has signed.
type Account struct {
	OperatorSeed, Seed string // secrets
	Server             string // the part of the servers' configuration
}

// NewAccount creates an operator, an account with JetStream, and the account of the servers themselves.
func NewAccount() (a Account, err error) {
	operator, err := nkeys.CreateOperator()
	if err != nil {
		return a, err
	}
	account, err := nkeys.CreateAccount()
	if err != nil {
		return a, err
	}
	system, err := nkeys.CreateAccount() // it never signs users, so its seed is not kept
	if err != nil {
		return a, err
	}
	claims := jwt.NewAccountClaims(public(account))
	claims.Name = "tidings"
	claims.Limits.JetStreamLimits = jwt.JetStreamLimits{DiskStorage: jwt.NoLimit, MemoryStorage: jwt.NoLimit,
		Streams: jwt.NoLimit, Consumer: jwt.NoLimit}
	own := jwt.NewOperatorClaims(public(operator))
	own.Name, own.SystemAccount = "tidings", public(system)
	servers := jwt.NewAccountClaims(public(system))
	servers.Name = "SYS"
	var signed [3]string
	for i, c := range []jwt.Claims{own, claims, servers} {
		if signed[i], err = c.Encode(operator); err != nil {
			return a, fmt.Errorf("sign: %w", err)
		}
	}
	a.Server = fmt.Sprintf("operator: %s\nsystem_account: %s\nresolver: MEMORY\nresolver_preload: {\n  %s: %s\n  %s: %s\n}\n",
		signed[0], public(system), public(account), signed[1], public(system), signed[2])
	if a.OperatorSeed, err = seed(operator); err != nil {
		return a, err
	}
	a.Seed, err = seed(account)
	return a, err
}

// public returns the public key. Every key pair has one.
func public(k nkeys.KeyPair) string {
	key, err := k.PublicKey()
	if err != nil {
		panic(err)
	}
	return key
}

func seed(k nkeys.KeyPair) (string, error) {
	s, err := k.Seed()
	return string(s), err
}

// Credentials returns a credentials file (NATS_CREDENTIALS) for p, signed with the account's seed. It expires after
// expires; 0 means never.
func Credentials(c Config, p Principal, accountSeed string, expires time.Duration) ([]byte, error) {
	account, err := nkeys.FromSeed([]byte(strings.TrimSpace(accountSeed)))
	if err != nil {
		return nil, fmt.Errorf("read the account's seed: %w", err)
	}
	if !nkeys.IsValidPublicAccountKey(public(account)) {
		return nil, fmt.Errorf("the seed belongs to a key of type %.1s, not to an account", public(account))
	}
	user, err := nkeys.CreateUser()
	if err != nil {
		return nil, err
	}
	claims := jwt.NewUserClaims(public(user))
	claims.Name = p.Name
	if expires > 0 {
		claims.Expires = time.Now().Add(expires).Unix()
	}
	publish, subscribe := p.Permissions(c)
	claims.Pub.Allow.Add(publish...)
	claims.Sub.Allow.Add(subscribe...)
	if len(publish) == 0 { // an empty list would allow everything
		claims.Pub.Deny.Add(">")
	}
	token, err := claims.Encode(account)
	if err != nil {
		return nil, fmt.Errorf("sign the credentials of %s: %w", p.Name, err)
	}
	secret, err := user.Seed()
	if err != nil {
		return nil, err
	}
	return jwt.FormatUserConfig(token, secret)
}
