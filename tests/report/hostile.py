"""Forty strings that would be markup, or a program, wherever they are not escaped."""

BAD = "document.body.setAttribute('data-pwned','1')"


def payloads(url: str) -> list[str]:
    """`url` is a place whose visits are counted."""
    return [
        f"<script>{BAD}</script>", f"</script><script>{BAD}</script>", f"<ScRiPt>{BAD}</sCrIpT>",
        f"<script src='{url}/1'></script>", f"\"><script>{BAD}</script>", f"'><script>{BAD}</script>",
        f"<img src=x onerror=\"{BAD}\">", f"<img src={url}/2>", f"<svg onload=\"{BAD}\">",
        f"<svg><script>{BAD}</script></svg>", f"<body onload=\"{BAD}\">", f"<iframe src='{url}/3'></iframe>",
        f"<iframe srcdoc=\"<script>parent.{BAD}</script>\">", f"<object data='{url}/4'></object>",
        f"<embed src='{url}/5'>", f"<link rel=stylesheet href='{url}/6'>", f"<style>@import '{url}/7';</style>",
        f"</style><script>{BAD}</script>", f"</title><script>{BAD}</script>", f"--><script>{BAD}</script>",
        f"]]><script>{BAD}</script>", f"<a href=\"javascript:{BAD}\">x</a>", f"<form action={url}/8><input autofocus>",
        f"<input onfocus=\"{BAD}\" autofocus>", f"<details open ontoggle=\"{BAD}\">",
        f"<video src={url}/9 onerror={BAD}>",
        f"<meta http-equiv=refresh content='0;url={url}/10'>", f"<base href='{url}/'>", f"<math><mtext><script>{BAD}",
        f"<template><script>{BAD}</script></template>", f"<noscript><p title=\"</noscript><img src=x onerror={BAD}>\">",
        f"<textarea></textarea><script>{BAD}</script>", f"&lt;script&gt;{BAD}&lt;/script&gt;",
        f"\\u003cscript\\u003e{BAD}", f"@@body@@<script>{BAD}</script>", f"{{{{ '{BAD}' }}}}", f"${{{BAD}}}",
        f"[x](javascript:{BAD}) ![y]({url}/11) `code` *bold* | cell | # head",
        f"#image(\"{url}/12\") #read(\"/etc/passwd\") $x$ *b* _i_ @ref <label> \\ \"quoted\"",
        f"\"; }} body {{ background: url({url}/13) }} /* ☃ 汉字 \u202e rtl",
    ]  # fmt: skip
