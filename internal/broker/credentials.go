package broker

import (
	"errors"
	"fmt"
	"os"
	"regexp"
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

// accountJWT finds the accounts in the servers' configuration: NewAccount writes them as KEY: JWT.
var accountJWT = regexp.MustCompile(`\b(A[A-Z2-7]{55})\b([\s:="]+)(eyJ[\w-]+\.[\w-]+\.[\w-]+)`)

// Revoke returns the servers' configuration (Account.Server) in which the accounts revoke the credentials of a user
// that were signed until now. Servers that read it close the user's connections. Without the user's account, all
// accounts revoke the user's key: no other account has it.
func Revoke(conf, operatorSeed string, user User) (string, error) {
	operator, err := nkeys.FromSeed([]byte(strings.TrimSpace(operatorSeed)))
	if err != nil {
		return "", fmt.Errorf("read the operator's seed: %w", err)
	}
	if !nkeys.IsValidPublicOperatorKey(public(operator)) {
		return "", fmt.Errorf("the seed belongs to a key of type %.1s, not to an operator", public(operator))
	}
	if !nkeys.IsValidPublicUserKey(user.Key) {
		return "", fmt.Errorf("%q is not the public key of a user", user.Key)
	}
	revoked := 0
	conf = accountJWT.ReplaceAllStringFunc(conf, func(entry string) string {
		parts := accountJWT.FindStringSubmatch(entry)
		if err != nil || user.Account != "" && parts[1] != user.Account {
			return entry
		}
		var claims *jwt.AccountClaims
		if claims, err = jwt.DecodeAccountClaims(parts[3]); err != nil {
			return entry
		}
		if claims.Issuer != public(operator) {
			err = fmt.Errorf("another operator signed the account %s (%s)", claims.Subject, claims.Name)
			return entry
		}
		claims.Revoke(user.Key)
		var signed string
		if signed, err = claims.Encode(operator); err != nil {
			return entry
		}
		revoked++
		return parts[1] + parts[2] + signed
	})
	switch {
	case err != nil:
		return "", fmt.Errorf("revoke %s: %w", user.Key, err)
	case revoked == 0 && user.Account != "":
		return "", fmt.Errorf("the configuration lacks the account %s of these credentials", user.Account)
	case revoked == 0:
		return "", errors.New("the configuration has no account of an operator")
	}
	return conf, nil
}
