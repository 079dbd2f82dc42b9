package broker

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nkeys"
)

// readCredentials returns the claims of a credentials file.
func readCredentials(text []byte) (*jwt.UserClaims, error) {
	token, err := jwt.ParseDecoratedJWT(text)
	if err != nil {
		return nil, err
	}
	return jwt.DecodeUserClaims(token)
}

// User is the user of a credentials file.
type User struct {
	Name            string
	Key             string // public
	Account         string // the public key of its account
	Issued, Expires time.Time
}

// ReadUser reads the user of a credentials file. Expires is zero for credentials that never expire.
func ReadUser(path string) (u User, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return u, err
	}
	claims, err := readCredentials(text)
	if err != nil {
		return u, fmt.Errorf("read the credentials in %s: %w", path, err)
	}
	u = User{Name: claims.Name, Key: claims.Subject, Account: claims.Issuer, Issued: time.Unix(claims.IssuedAt, 0)}
	if claims.IssuerAccount != "" { // a signing key of the account signed them
		u.Account = claims.IssuerAccount
	}
	if claims.Expires > 0 {
		u.Expires = time.Unix(claims.Expires, 0)
	}
	return u, nil
}

// Revocation ends the credentials of a user that were signed until At. Other credentials have other
// keys.
type Revocation struct {
	Key     string // public
	Account string // the public key of its account; "" if nobody knows: no user of another account has the key
	At      time.Time
}

// String returns the revocation as a line for ParseRevocation.
func (r Revocation) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s %s %s", r.Key, r.At.UTC().Format(time.RFC3339), r.Account))
}

// ParseRevocation reads a line that String returned.
func ParseRevocation(line string) (r Revocation, err error) {
	fields := strings.Fields(line)
	if len(fields) < 2 || len(fields) > 3 {
		return r, fmt.Errorf("%q is not a revocation: want a key, a time, and an account", line)
	}
	r.Key = fields[0]
	if r.At, err = time.Parse(time.RFC3339, fields[1]); err != nil {
		return r, err
	}
	if len(fields) == 3 {
		r.Account = fields[2]
	}
	return r, r.Validate()
}

// Validate reports a key of the wrong kind.
func (r Revocation) Validate() error {
	if !nkeys.IsValidPublicUserKey(r.Key) {
		return fmt.Errorf("%q is not the public key of a user", r.Key)
	}
	if r.Account != "" && !nkeys.IsValidPublicAccountKey(r.Account) {
		return fmt.Errorf("%q is not the public key of an account", r.Account)
	}
	return nil
}

// HasAccount reports whether one of the keys is that of the account with the public key.
func (k Keys) HasAccount(key string) bool {
	for name := range k {
		if pair, err := k.pair(name); err == nil && public(pair) == key {
			return true
		}
	}
	return false
}
