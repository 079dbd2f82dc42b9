// Package tokens manages the bearer tokens of services: their tenants, their roles and their rate
// limits. It is for the API, the console and operators' commands.
//
//	Issue, Ensure, Revoke, List (operators)  ──▶  api_tokens, by hash  ◀──  Lookup (the API, before the tenant is known)
package tokens
