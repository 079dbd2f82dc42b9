package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/tidings/tidings/internal/tokens"
	"github.com/tidings/tidings/store"
)

// createdToken is the output of `tidings token create --json`.
type createdToken struct {
	Token    string     `json:"token"`
	Print    string     `json:"fingerprint"`
	TenantID int64      `json:"tenant_id,string"`
	Name     string     `json:"name"`
	Roles    []string   `json:"roles"`
	Expires  *time.Time `json:"expires,omitempty"`
	Replaced *time.Time `json:"replaced_until,omitempty"` // when the replaced token expires
}

// listedToken is a line of `tidings token list --json`, and the output of `tidings token identify
// --json`.
type listedToken struct {
	Fingerprint string       `json:"fingerprint"`
	TenantID    int64        `json:"tenant_id,string"`
	Name        string       `json:"name"`
	Roles       []string     `json:"roles"`
	Works       bool         `json:"works"`
	Created     time.Time    `json:"created"`
	Expires     *time.Time   `json:"expires,omitempty"`
	Replaced    *time.Time   `json:"replaced,omitempty"`
	Revoked     *time.Time   `json:"revoked,omitempty"`
	RateRead    *tokens.Rate `json:"rate_read,omitempty"`
	RateWrite   *tokens.Rate `json:"rate_write,omitempty"`
}

// revokedToken is the output of `tidings token revoke --json`.
type revokedToken struct {
	TenantID int64     `json:"tenant_id,string"`
	Name     string    `json:"name"`
	Revoked  time.Time `json:"revoked"`
	Ended    int64     `json:"ended"` // tokens that this command revoked, valid or expired
}

const tokenCreateHelp = `Create prints the token once: Tidings keeps only its hash.

A name has one current token. With --replace the new token takes its place, and the old one remains
valid for --overlap. In that time, give the new one to the service. The new token keeps the roles
and rates of the old one unless you give others. The name of a revoked or expired token is free
again.

With --system the token is an operator's: it opens the console for every tenant, and the API's
routes refuse it. Its roles are read (see), moderate (decide on pending content) and admin (act); by
default it has only read.`

// newToken has the flags of token create.
type newToken struct {
	expires, read, write string
	spec                 tokens.Spec
	whose                tokenOwner
}

func (p Process) tokenCreateCommand() *cobra.Command {
	var o newToken
	c := p.command(command{
		use:   "create {--tenant T | --system} --name NAME",
		short: "Create a token and print it once", long: tokenCreateHelp,
		name: "token", needs: needTruth, json: oneObject,
		check: func(s *session, _ []string) error {
			return o.check(s)
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			return nil, o.issue(ctx, s)
		},
	})
	o.whose.flags(c, "the tenant")
	c.Flags().StringVar(&o.spec.Name, "name", "", "the token's name, the default actor of its writes")
	rolesFlag(c, &o.spec.Roles)
	c.Flags().StringVar(&o.expires, "expires", "",
		"when it expires: a duration such as 720h, a date, or a time in RFC 3339 (default: never)")
	c.Flags().BoolVar(&o.spec.Replace, "replace", false, "replace the current token of this name")
	c.Flags().DurationVar(&o.spec.Overlap, "overlap", 24*time.Hour, "how long the replaced token remains valid")
	c.Flags().StringVar(&o.read, "rate-read", "", "reads per window, such as 100/1s, or off for no limit (default: API_RATE_READ)")
	c.Flags().StringVar(&o.write, "rate-write", "", "writes per window, such as 100/1s, or off for no limit (default: API_RATE_WRITE)")
	return c
}

// check completes the spec from the other flags.
func (o *newToken) check(s *session) error {
	if err := o.whose.check("token create", o.spec.Name); err != nil {
		return err
	}
	o.spec.TenantID = o.whose.tenant
	if o.whose.system && !s.changed("roles") {
		o.spec.Roles = []string{tokens.RoleRead}
	}
	if o.expires != "" {
		var err error
		if o.spec.Expires, err = parseExpires(o.expires, time.Now()); err != nil {
			return &usageError{fmt.Errorf("--expires: %w", err)}
		}
	}
	if s.changed("overlap") && !o.spec.Replace || o.spec.Overlap < 0 {
		return &usageError{errors.New("--overlap needs --replace, and must be 0 or more")}
	}
	if err := errors.Join(parseRate("--rate-read", o.read, &o.spec.ReadRate),
		parseRate("--rate-write", o.write, &o.spec.WriteRate)); err != nil {
		return &usageError{err}
	}
	if o.spec.Replace && !s.changed("roles") {
		o.spec.Roles = nil
	}
	return nil
}

// issue creates the token and prints it.
func (o *newToken) issue(ctx context.Context, s *session) error {
	made, err := tokens.Issue(ctx, s.Truth, o.spec)
	switch {
	case errors.Is(err, store.ErrInvalid):
		return &usageError{err}
	case errors.Is(err, tokens.ErrUnknown):
		return fmt.Errorf("%s has no valid token named %q: create one without --replace", &o.whose, o.spec.Name)
	case errors.Is(err, tokens.ErrExists):
		return fmt.Errorf("%s already has a token named %q: choose another --name, or --replace it", &o.whose, o.spec.Name)
	case err != nil:
		return err
	}
	t := createdToken{TenantID: o.spec.TenantID, Name: o.spec.Name, Token: made.Token, Print: tokens.Fingerprint(made.Token),
		Roles: made.Roles, Replaced: inUTC(made.Replaced)}
	if o.expires != "" {
		t.Expires = &o.spec.Expires
	}
	if err := s.print(reports(t, sentence("%s\n", t.Token))); err != nil || s.asJSON {
		return err
	}
	fmt.Fprintf(s.Stderr, "Token %q of %s, roles %s, fingerprint %s. Store it now: Tidings cannot show it again.\n", t.Name, &o.whose,
		strings.Join(t.Roles, ", "), t.Print)
	if t.Replaced != nil {
		fmt.Fprintf(s.Stderr, "The replaced token expires at %s.\n", utc(t.Replaced))
	}
	return nil
}

// rolesFlag adds --roles to token create. Its text names the defaults, which depend on other flags.
func rolesFlag(c *cobra.Command, roles *[]string) {
	c.Flags().StringSliceVar(roles, "roles", []string{tokens.RoleRead, tokens.RoleWrite},
		"roles, separated by commas: "+strings.Join(tokens.Roles(), ", ")+"; a system token uses only read, moderate and admin "+
			"(default: those of a replaced token; else read,write, or read for a system token)")
	c.Flags().Lookup("roles").DefValue = "[]"
}

// tokenOwner is the owner of a token: a tenant, or the operators.
type tokenOwner struct {
	tenant int64
	system bool
}

func (o *tokenOwner) flags(c *cobra.Command, tenant string) {
	c.Flags().Int64Var(&o.tenant, "tenant", 0, tenant)
	c.Flags().BoolVar(&o.system, "system", false, "a system token without a tenant, for operators in the console")
}

// check returns a usageError unless the command names one owner and a token.
func (o *tokenOwner) check(command, name string) error {
	if o.tenant < 0 || (o.tenant == tokens.SystemTenant) != o.system || name == "" {
		return &usageError{fmt.Errorf("%s needs --name, and either --tenant (a positive number) or --system", command)}
	}
	return nil
}

func (o *tokenOwner) String() string {
	if o.system {
		return "the system"
	}
	return fmt.Sprintf("tenant %d", o.tenant)
}

func tenantText(tenant int64) string {
	if tenant == tokens.SystemTenant {
		return "system"
	}
	return fmt.Sprint(tenant)
}

// parseRate sets *to to the flag's rate, if the flag has a value.
func parseRate(flag, value string, to **tokens.Rate) error {
	if value == "" {
		return nil
	}
	r, err := tokens.ParseRate(value)
	if err != nil {
		return fmt.Errorf("%s: %w", flag, err)
	}
	*to = &r
	return nil
}

func (p Process) tokenListCommand() *cobra.Command {
	var (
		tenant int64
		system bool
		within time.Duration
	)
	c := p.command(command{
		use: "list", short: "List all tokens, also revoked and expired ones, by their fingerprints",
		name: "token", needs: needTruth, json: onePer("token"),
		check: func(*session, []string) error {
			if tenant < 0 || within < 0 || tenant > 0 && system {
				return &usageError{errors.New("--tenant must be a positive number without --system, and --expires-within a " +
					"duration such as 336h")}
			}
			return nil
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			all, err := tokens.List(ctx, s.Truth, tenant)
			if err != nil {
				return nil, err
			}
			if system {
				all = slices.DeleteFunc(all, func(t tokens.Token) bool { return t.TenantID != tokens.SystemTenant })
			}
			if within > 0 {
				until := time.Now().Add(within)
				all = slices.DeleteFunc(all, func(t tokens.Token) bool { return !t.Works || t.Expires == nil || t.Expires.After(until) })
			}
			return listTokens(all...), nil
		},
	})
	c.Flags().Int64Var(&tenant, "tenant", 0, "only of this tenant")
	c.Flags().BoolVar(&system, "system", false, "only system tokens")
	c.Flags().DurationVar(&within, "expires-within", 0, "only valid tokens that expire within this time, such as 336h")
	return c
}

func listTokens(all ...tokens.Token) *report {
	var listed []listedToken
	rows := [][]string{{"FINGERPRINT", "TENANT", "NAME", "ROLES", "CREATED", "STATE", "READS", "WRITES"}}
	for _, t := range all {
		listed = append(listed, listedToken{
			Fingerprint: t.Fingerprint, TenantID: t.TenantID, Name: t.Name, Roles: t.Roles, Works: t.Works, Created: t.Created.UTC(),
			Expires: inUTC(t.Expires), Replaced: inUTC(t.Replaced), Revoked: inUTC(t.Revoked), RateRead: t.ReadRate, RateWrite: t.WriteRate,
		})
		rows = append(rows, []string{t.Fingerprint, tenantText(t.TenantID), t.Name, strings.Join(t.Roles, ","), utc(&t.Created),
			tokenState(t), rateText(t.ReadRate), rateText(t.WriteRate)})
	}
	return lists(listed, rowsOf(rows...))
}

func (p Process) tokenIdentifyCommand() *cobra.Command {
	var token string
	return p.command(command{
		use:   "identify",
		short: "Find the owner of a token, also of a revoked or expired one",
		long: `Identify reads a token from stdin, or asks for it without showing it, and names its owner. It takes
no argument, because every user of the machine sees arguments and the shell's history keeps them. It
neither logs nor prints the token, and sends only its hash to the database. tidings token revoke
ends it.`,
		args: func(_ *cobra.Command, args []string) error {
			if len(args) > 0 {
				return errors.New("token identify reads the token from its input. Every user of the machine can see arguments, so " +
					"revoke a token that you gave as one")
			}
			return nil
		},
		name: "token", needs: needTruth, json: oneObject,
		check: func(s *session, _ []string) (err error) {
			token, err = s.secret("Token: ")
			return err
		},
		run: func(ctx context.Context, s *session, _ []string) (*report, error) {
			t, err := tokens.Identify(ctx, s.Truth, token)
			if errors.Is(err, tokens.ErrUnknownToken) {
				return nil, errors.New("this installation never created that token")
			}
			if err != nil {
				return nil, err
			}
			return listTokens(t), nil
		},
	})
}

// maxSecret is the longest line with a secret, in bytes.
const maxSecret = 4096

// keyboard reads a line that it does not show. Tests replace the terminal's.
type keyboard interface{ ReadPassword() ([]byte, error) }

type tty struct{ fd int }

func (t tty) ReadPassword() ([]byte, error) { return term.ReadPassword(t.fd) }

// keyboard returns the keyboard of a person, if the input is one.
func (p Process) keyboard() (keyboard, bool) {
	if k, ok := p.Stdin.(keyboard); ok {
		return k, true
	}
	f, ok := p.Stdin.(*os.File)
	if !ok || !term.IsTerminal(int(f.Fd())) {
		return nil, false
	}
	return tty{int(f.Fd())}, true
}

// secret reads one line, with or without the word Bearer before it. A terminal does not echo the
// input. No error contains it.
func (p Process) secret(prompt string) (string, error) {
	var line []byte
	var err error
	if k, ok := p.keyboard(); ok {
		fmt.Fprint(p.Stderr, prompt)
		line, err = k.ReadPassword()
		fmt.Fprintln(p.Stderr)
	} else if line, err = bufio.NewReaderSize(io.LimitReader(p.Stdin, maxSecret), maxSecret).ReadSlice('\n'); errors.Is(err, io.EOF) {
		err = nil
	}
	if err != nil {
		return "", fmt.Errorf("read the token: %w", err)
	}
	s := strings.TrimSpace(string(line))
	if scheme, rest, ok := strings.Cut(s, " "); ok && strings.EqualFold(scheme, "Bearer") {
		s = strings.TrimSpace(rest)
	}
	if s == "" {
		return "", &usageError{errors.New("there is no token in the input")}
	}
	return s, nil
}

// tokenState describes the state of the token for people.
func tokenState(t tokens.Token) string {
	switch {
	case t.Revoked != nil:
		return "revoked " + utc(t.Revoked)
	case !t.Works:
		return "expired " + utc(t.Expires)
	case t.Replaced != nil && t.Expires != nil:
		return "replaced, until " + utc(t.Expires)
	case t.Expires != nil:
		return "until " + utc(t.Expires)
	}
	return "active"
}

func rateText(r *tokens.Rate) string {
	if r == nil {
		return "default"
	}
	if r.Off() {
		return "unlimited"
	}
	return r.String()
}

func utc(t *time.Time) string { return t.UTC().Format(time.RFC3339) }

func inUTC(t *time.Time) *time.Time {
	if t == nil {
		return nil
	}
	u := t.UTC()
	return &u
}

func (p Process) tokenRevokeCommand() *cobra.Command {
	var (
		t     revokedToken
		whose tokenOwner
	)
	c := p.command(command{
		use:   "revoke {--tenant T | --system} --name NAME",
		short: "Revoke every token of a name, and the tokens that they created: every API process refuses them within a second",
		name:  "token", needs: needTruth, json: oneObject, destructive: true,
		check: func(*session, []string) error {
			t.TenantID = whose.tenant
			return whose.check("token revoke", t.Name)
		},
		run: func(ctx context.Context, s *session, _ []string) (_ *report, err error) {
			if err := s.ask(func(w io.Writer) error { return showRevoked(ctx, w, s.Truth, t) }); err != nil {
				return nil, err
			}
			t.Ended, t.Revoked, err = tokens.Revoke(ctx, s.Truth, t.TenantID, t.Name)
			if errors.Is(err, tokens.ErrUnknown) {
				return nil, fmt.Errorf("%s has no token named %q", &whose, t.Name)
			}
			if err != nil {
				return nil, err
			}
			t.Revoked = t.Revoked.UTC()
			was := "was"
			if t.Ended == 0 {
				was = "was already"
			}
			return reports(t, sentence("Token %q of %s %s revoked at %s.\n", t.Name, &whose, was, utc(&t.Revoked))), nil
		},
	})
	whose.flags(c, "the tenant")
	c.Flags().StringVar(&t.Name, "name", "", "the token's name")
	return c
}

// showRevoked shows the tokens that the command would revoke.
func showRevoked(ctx context.Context, w io.Writer, pool *pgxpool.Pool, t revokedToken) error {
	all, err := tokens.List(ctx, pool, t.TenantID)
	if err != nil {
		return err
	}
	rows := [][]string{{"TENANT", "NAME", "ROLES", "CREATED", "STATE"}}
	for _, token := range tokens.RevokedWith(all, t.TenantID, t.Name) {
		rows = append(rows, []string{tenantText(token.TenantID), token.Name, strings.Join(token.Roles, ","),
			utc(&token.Created), tokenState(token)})
	}
	if len(rows) == 1 {
		return errNothingToDelete
	}
	fmt.Fprintln(w, "The API refuses these tokens within a second after the command:")
	return tableTo(w, rows...)
}

// parseExpires reads a duration from now on, a date (midnight UTC at its beginning), or a time. The
// result must be in the future.
func parseExpires(s string, now time.Time) (time.Time, error) {
	var t time.Time
	if d, err := time.ParseDuration(s); err == nil {
		t = now.Add(d)
	} else if t, err = time.Parse(time.DateOnly, s); err != nil {
		if t, err = time.Parse(time.RFC3339, s); err != nil {
			return t, fmt.Errorf("%q is not a duration (720h), a date (2030-01-31) or a time (2030-01-31T12:00:00Z)", s)
		}
	}
	if !t.After(now) {
		return t, fmt.Errorf("%s is in the past", t.UTC().Format(time.RFC3339))
	}
	return t.UTC(), nil
}
